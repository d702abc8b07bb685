"""Attention over compressed blocks, forward.

Flash attention (arXiv 2307.08691, algorithm 1) with the causal rule of compression: query ``t``
sees block ``c`` when ``c d + l - 1 <= t`` (arXiv 2502.11089, equation 8).
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.loading import load_tile
from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_finish, softmax_init, softmax_step
from sparsek_kernels.nsa.kernels.tiles import compressed_visible, locate_tile


@triton.jit
def _attend_run(
    acc, m, denom, q,
    k_ptr, v_ptr,
    scale_log2,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    seen, first, last,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over compressed keys ``first .. last - 1``; row ``i`` sees ``seen[i]``."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        key = start + offs_n  # [BLOCK_N]
        row = key.to(tl.int64)
        k_ptrs = k_ptr + row[None, :] * stride_kt + offs_d[:, None] * stride_kd
        v_ptrs = v_ptr + row[:, None] * stride_vt + offs_d[None, :] * stride_vd
        mask_n = key < last
        k = load_tile(k_ptrs, mask_n[None, :], mask_d[:, None], MASKED, PADDED)
        v = load_tile(v_ptrs, mask_n[:, None], mask_d[None, :], MASKED, PADDED)
        scores = tl.dot(q, k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            scores = tl.where(key[None, :] < seen[:, None], scores, float("-inf"))
        m, denom, p, alpha = softmax_step(m, denom, scores, scale_log2, MASKED)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return acc, m, denom


@triton.jit
def nsa_compressed_fwd_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, cu_seqlens_ptr, cu_cmp_ptr, tiles_ptr,
    scale,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, offset, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` queries of one head; ``out`` and ``lse`` are contiguous.

    The last queries, which see the most blocks, start first.
    """
    head = tl.program_id(1)
    seq, tile, batch, q_start, q_len, c_start, offset = locate_tile(
        tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2),
        tiles_ptr, cu_seqlens_ptr, cu_cmp_ptr, num_q, offset, VARLEN,
    )  # fmt: skip
    if seq < 0:
        return
    kv_head = (head // GROUP).to(tl.int64)
    batch = batch.to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < q_len
    mask_q = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = (q_start + offs_m).to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head.to(tl.int64) * stride_qh + rows[:, None] * stride_qt
    q = tl.load(q_ptrs + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh + c_start.to(tl.int64) * stride_kt
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh + c_start.to(tl.int64) * stride_vt

    seen = compressed_visible(offs_m + offset, CMP_BLOCK, CMP_STRIDE)  # [BLOCK_M]
    seen = tl.where(mask_m, seen, 0)
    least = compressed_visible(tile * BLOCK_M + offset, CMP_BLOCK, CMP_STRIDE)
    full = least // BLOCK_N * BLOCK_N
    last = tl.max(seen, 0)
    m, denom = softmax_init(0.0, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)  # [BLOCK_M, BLOCK_D]
    scale_log2 = scale * LOG2E
    acc, m, denom = _attend_run(
        acc, m, denom, q, k_base, v_base, scale_log2, stride_kt, stride_kd, stride_vt, stride_vd,
        seen, 0, full, False, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, NUM_STAGES,
    )  # fmt: skip
    acc, m, denom = _attend_run(
        acc, m, denom, q, k_base, v_base, scale_log2, stride_kt, stride_kd, stride_vt, stride_vd,
        seen, full, last, True, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, 1,
    )  # fmt: skip
    inv_l, lse = softmax_finish(m, denom)
    out_row = (batch * num_q + rows) * num_heads + head
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptrs, (acc * inv_l[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)
    tl.store(lse_ptr + (batch * num_heads + head) * num_q + rows, lse, mask=mask_m)

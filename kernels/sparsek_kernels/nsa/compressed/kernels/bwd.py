"""Attention over compressed blocks, backward.

With ``p = exp(s - lse)``, ``delta = sum_d out dout - dlse``:

    dv_c = sum_t p dout_t,   ds = p (dout_t . v_c - delta_t),   dk_c = scale sum_t ds q_t,
    dq_t = scale sum_c ds k_c
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.kernels.tiles import compressed_visible, locate_tile


@triton.jit
def nsa_compressed_bwd_dq_kernel(
    dq_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_seqlens_ptr, cu_cmp_ptr,
    tiles_ptr,
    scale,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, offset, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``dq`` of ``BLOCK_M`` queries of one head; ``dq`` is contiguous."""
    head = tl.program_id(1)
    seq, tile, batch, q_start, q_len, c_start, offset = locate_tile(
        tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2),
        tiles_ptr, cu_seqlens_ptr, cu_cmp_ptr, num_q, offset, VARLEN,
    )  # fmt: skip
    if seq < 0:
        return
    kv_head = (head // GROUP).to(tl.int64)
    batch = batch.to(tl.int64)
    wide_head = head.to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < q_len
    mask_d = offs_d < HEAD_DIM
    mask_q = mask_m[:, None] & mask_d[None, :]
    rows = (q_start + offs_m).to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + wide_head * stride_qh + rows[:, None] * stride_qt
    q = tl.load(q_ptrs + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0)
    g_ptrs = dout_ptr + batch * stride_gb + wide_head * stride_gh + rows[:, None] * stride_gt
    dout = tl.load(g_ptrs + offs_d[None, :] * stride_gd, mask=mask_q, other=0.0)
    stat = (batch * num_heads + head) * num_q + rows
    # Rows without keys have lse = -inf; +inf makes their probabilities zero.
    lse = tl.load(lse_ptr + stat, mask=mask_m, other=float("inf"))  # [BLOCK_M]
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    delta = tl.load(delta_ptr + stat, mask=mask_m, other=0.0)  # [BLOCK_M]
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh + c_start.to(tl.int64) * stride_kt
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh + c_start.to(tl.int64) * stride_vt
    seen = compressed_visible(offs_m + offset, CMP_BLOCK, CMP_STRIDE)  # [BLOCK_M]
    last = tl.max(tl.where(mask_m, seen, 0), 0)
    scale_log2 = scale * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)  # [BLOCK_M, BLOCK_D]
    for start in tl.range(0, last, BLOCK_N, num_stages=NUM_STAGES):
        key = start + offs_n  # [BLOCK_N]
        row = key.to(tl.int64)[:, None]
        mask_k = (key < last)[:, None] & mask_d[None, :]
        k = tl.load(k_base + row * stride_kt + offs_d[None, :] * stride_kd, mask=mask_k, other=0.0)
        v = tl.load(v_base + row * stride_vt + offs_d[None, :] * stride_vd, mask=mask_k, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        p = tl.where(key[None, :] < seen[:, None], p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    dq_row = (batch * num_q + rows) * num_heads + head
    dq_ptrs = dq_ptr + dq_row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(dq_ptrs, (acc * scale).to(dq_ptr.dtype.element_ty), mask=mask_q)


@triton.jit
def nsa_compressed_bwd_dkdv_kernel(
    dk_ptr, dv_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_seqlens_ptr, cu_cmp_ptr,
    tiles_ptr,
    scale,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, offset, num_heads, num_cmp,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_N`` compressed keys against all queries of one query head.

    Writes fp32 ``[Hq, B, C, D]`` parts, which the host sums over the group.  ``tiles`` maps tiles
    of compressed keys.
    """
    head = tl.program_id(1)
    tile = tl.program_id(0)
    seq = tl.program_id(2)
    if VARLEN:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        if seq < 0:
            return
        q_start = tl.load(cu_seqlens_ptr + seq)
        q_len = tl.load(cu_seqlens_ptr + seq + 1) - q_start
        c_start = tl.load(cu_cmp_ptr + seq)
        c_len = tl.load(cu_cmp_ptr + seq + 1) - c_start
        batch = (seq * 0).to(tl.int64)
        offset = 0
    else:
        q_start = seq * 0
        q_len = num_q
        c_start = seq * 0
        c_len = num_cmp
        batch = seq.to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    wide_head = head.to(tl.int64)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < HEAD_DIM
    mask_n = offs_n < c_len
    mask_k = mask_n[:, None] & mask_d[None, :]
    keys = (c_start + offs_n).to(tl.int64)
    k_ptrs = k_ptr + batch * stride_kb + kv_head * stride_kh + keys[:, None] * stride_kt
    k = tl.load(k_ptrs + offs_d[None, :] * stride_kd, mask=mask_k, other=0.0)
    v_ptrs = v_ptr + batch * stride_vb + kv_head * stride_vh + keys[:, None] * stride_vt
    v = tl.load(v_ptrs + offs_d[None, :] * stride_vd, mask=mask_k, other=0.0)
    q_base = q_ptr + batch * stride_qb + wide_head * stride_qh
    g_base = dout_ptr + batch * stride_gb + wide_head * stride_gh
    stat = (batch * num_heads + head) * num_q + q_start
    first = tile * BLOCK_N * CMP_STRIDE + CMP_BLOCK - 1 - offset
    first = tl.maximum(first, 0) // BLOCK_M * BLOCK_M
    scale_log2 = scale * LOG2E
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)  # [BLOCK_N, BLOCK_D]
    for start in tl.range(first, q_len, BLOCK_M, num_stages=NUM_STAGES):
        local = start + offs_m  # [BLOCK_M]
        mask_m = local < q_len
        mask_q = mask_m[:, None] & mask_d[None, :]
        rows = (q_start + local).to(tl.int64)[:, None]
        q = tl.load(q_base + rows * stride_qt + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0)
        dout = tl.load(
            g_base + rows * stride_gt + offs_d[None, :] * stride_gd, mask=mask_q, other=0.0
        )  # [BLOCK_M, BLOCK_D]
        lse = tl.load(lse_ptr + stat + local, mask=mask_m, other=float("inf"))  # [BLOCK_M]
        lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
        delta = tl.load(delta_ptr + stat + local, mask=mask_m, other=0.0)  # [BLOCK_M]
        seen = compressed_visible(local + offset, CMP_BLOCK, CMP_STRIDE)  # [BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        p = tl.where(offs_n[:, None] < seen[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    row = (wide_head * tl.num_programs(2) + batch) * num_cmp + keys
    if VARLEN:
        row = wide_head * num_cmp + keys
    at = row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(dk_ptr + at, dk * scale, mask=mask_k)
    tl.store(dv_ptr + at, dv, mask=mask_k)

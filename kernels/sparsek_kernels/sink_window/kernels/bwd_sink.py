"""Gradients that queries send to sink keys outside of their window.

Sink keys are seen by every later query, so their query loop is as long as the sequence.  It is
cut into chunks; each program sums one chunk over the whole GQA group into fp32 partial ``dk`` and
``dv``, which are added up in a fixed order afterwards.  With ``dq_acc`` the same pass also writes
the share of ``dq`` that comes from those keys, which initialises the fp32 accumulator of the
fused backward kernel.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.sequences import sequence_bounds
from sparsek_kernels.common.kernels.softmax import LOG2E


@triton.jit
def sink_window_bwd_sink_kernel(
    part_dk_ptr, part_dv_ptr, dq_acc_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    scale, num_sink, window_size,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads, num_chunks, num_sink_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VARLEN: tl.constexpr, WRITE_DQ: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_S`` sink keys of one KV head against one chunk of a sequence's rows.

    Grid ``(chunks * sink blocks, kv heads, sequences)``; partial sums are
    ``[sequences, chunks, Hkv, num_sink, D]`` fp32, ``dq_acc`` ``[B, Hq, N, D]`` fp32, unscaled.
    """
    chunk = tl.program_id(0) // num_sink_blocks
    sink_block = tl.program_id(0) % num_sink_blocks
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    batch, q_start, q_len, k_start, k_len = sequence_bounds(
        seq, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_q, num_k, VARLEN
    )
    batch = batch.to(tl.int64)
    offset = k_len - q_len
    key = sink_block * BLOCK_S + tl.arange(0, BLOCK_S)  # [BLOCK_S]
    mask_n = key < tl.minimum(num_sink, k_len)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < HEAD_DIM
    cols = offs_d[None, :]
    k_rows = (k_start + key).to(tl.int64)[:, None]
    mask_k = mask_n[:, None] & mask_d[None, :]
    k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    k = tl.load(k_base + k_rows * stride_kt + cols * stride_kd, mask=mask_k, other=0.0)
    v = tl.load(v_base + k_rows * stride_vt + cols * stride_vd, mask=mask_k, other=0.0)
    dk = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)

    chunk_rows = tl.cdiv(tl.cdiv(q_len, num_chunks), BLOCK_M) * BLOCK_M
    row_lo = chunk * chunk_rows
    row_hi = tl.minimum(row_lo + chunk_rows, q_len)
    if not WRITE_DQ:
        # Rows whose window still covers this block's first key send it nothing from here.
        outside = tl.maximum(sink_block * BLOCK_S + window_size - offset, 0)
        row_lo = tl.maximum(row_lo, outside // BLOCK_M * BLOCK_M)
    scale_log2 = scale * LOG2E
    num_blocks = tl.cdiv(tl.maximum(row_hi - row_lo, 0), BLOCK_M)
    for step in tl.range(0, num_blocks * GROUP, num_stages=NUM_STAGES):
        head = (kv_head * GROUP + step % GROUP).to(tl.int64)
        row = row_lo + step // GROUP * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        mask_m = row < row_hi
        mask_q = mask_m[:, None] & mask_d[None, :]
        wide = (q_start + row).to(tl.int64)
        q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + wide[:, None] * stride_qt
        g_ptrs = dout_ptr + batch * stride_gb + head * stride_gh + wide[:, None] * stride_gt
        q = tl.load(q_ptrs + cols * stride_qd, mask=mask_q, other=0.0)  # [BLOCK_M, BLOCK_D]
        dout = tl.load(g_ptrs + cols * stride_gd, mask=mask_q, other=0.0)  # [BLOCK_M, BLOCK_D]
        row_base = (batch * num_heads + head) * num_q
        lse = tl.load(lse_ptr + row_base + wide, mask=mask_m, other=0.0) * LOG2E  # [BLOCK_M]
        delta = tl.load(delta_ptr + row_base + wide, mask=mask_m, other=0.0)  # [BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_S, BLOCK_M]
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        seen = key[:, None] <= (row + offset - window_size)[None, :]
        p = tl.where(seen & mask_n[:, None] & mask_m[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_S, BLOCK_D]
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [BLOCK_S, BLOCK_M]
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)  # [BLOCK_S, BLOCK_D]
        if WRITE_DQ:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
            dq_ptrs = dq_acc_ptr + (row_base + wide)[:, None] * HEAD_DIM + cols
            tl.store(dq_ptrs, dq, mask=mask_q)
    part = (seq.to(tl.int64) * num_chunks + chunk) * tl.num_programs(1) + kv_head
    part_rows = (part * num_sink + key)[:, None] * HEAD_DIM + cols
    mask_part = (key < num_sink)[:, None] & mask_d[None, :]
    tl.store(part_dk_ptr + part_rows, dk, mask=mask_part)
    tl.store(part_dv_ptr + part_rows, dv, mask=mask_part)

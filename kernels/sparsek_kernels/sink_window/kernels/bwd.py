"""Backward kernels of sink + sliding-window attention, for every GPU that Triton knows.

With ``p_ij = exp(s_ij - lse_i)`` and ``delta_i = sum_d out_id dout_id - dlse_i``
(FlashAttention-2, arXiv 2307.08691, section 3.1.2 and algorithm 2):

    dv_j = sum_i p_ij dout_i            ds_ij = p_ij (dout_i . v_j - delta_i)
    dk_j = scale sum_i ds_ij q_i        dq_i  = scale sum_j ds_ij k_j

Nothing is accumulated atomically.  A program owns a block of keys of one KV head and walks the
queries of the whole GQA group whose *window* meets it.  Queries that see a sink key only because
it is a sink are many, so the kernel in ``bwd_sink.py`` sums them in parallel chunks, and their
total enters here as ``sink_dk`` and ``sink_dv``.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.loading import load_tile
from sparsek_kernels.common.kernels.masks import visible, window_key_blocks, window_query_blocks
from sparsek_kernels.common.kernels.sequences import sequence_bounds
from sparsek_kernels.common.kernels.softmax import LOG2E


@triton.jit
def _dkdv_blocks(
    dk, dv, k, v,
    q_ptr, dout_ptr, lse_ptr, delta_ptr,
    scale_log2,
    stride_qt, stride_qd,
    stride_gt, stride_gd,
    key, first_row, num_blocks, q_len, offset, window_size,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add the queries of ``num_blocks`` blocks from ``first_row`` on to ``dk`` and ``dv``."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    dims = (offs_d < HEAD_DIM)[None, :]
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    for block in tl.range(0, num_blocks, num_stages=NUM_STAGES):
        row = first_row + block * BLOCK_M + offs_m  # [BLOCK_M]
        row_wide = row.to(tl.int64)
        q_ptrs = q_ptr + row_wide[:, None] * stride_qt + offs_d[None, :] * stride_qd
        g_ptrs = dout_ptr + row_wide[:, None] * stride_gt + offs_d[None, :] * stride_gd
        mask_m = row < q_len
        q = load_tile(q_ptrs, mask_m[:, None], dims, MASKED, PADDED)  # [BLOCK_M, BLOCK_D]
        dout = load_tile(g_ptrs, mask_m[:, None], dims, MASKED, PADDED)  # [BLOCK_M, BLOCK_D]
        lse = load_tile(lse_ptr + row_wide, mask_m, True, MASKED, False) * LOG2E  # [BLOCK_M]
        delta = load_tile(delta_ptr + row_wide, mask_m, True, MASKED, False)  # [BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            seen = visible(
                (row + offset)[None, :], key[:, None], 0, window_size, CAUSAL, WINDOWED, False
            )
            p = tl.where(seen & mask_m[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@triton.jit
def sink_window_bwd_dkdv_kernel(
    dk_ptr, dv_ptr, term_dk_ptr, term_dv_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,
    sink_dk_ptr, sink_dv_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tiles_ptr, slots_ptr,
    scale, num_sink, window_size,
    stride_dkb, stride_dkt, stride_dkh,
    stride_dvb, stride_dvt, stride_dvh,
    stride_tb, stride_tt, stride_th,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_SINK_KEYS: tl.constexpr, HAS_TERMS: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``dk`` and ``dv`` of ``BLOCK_N`` keys of one KV head, over its whole group.

    Grid ``(key blocks, kv heads, batch)``, or ``(tiles, kv heads, 1)`` with ``VARLEN``.
    ``sink_dk`` and ``sink_dv`` ``[sequences, Hkv, num_sink, D]`` fp32 are unscaled.  With
    ``HAS_TERMS`` the row of key ``j`` also goes to row ``slots[j] >= 0`` of ``term_dk`` and
    ``term_dv`` ``[B, rows, Hkv, D]``, fp32.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    if VARLEN:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        if seq < 0:
            return
    batch, q_start, q_len, k_start, k_len = sequence_bounds(
        seq, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_q, num_k, VARLEN
    )
    batch = batch.to(tl.int64)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_k = (key < k_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
    k_rows = (k_start + key).to(tl.int64)[:, None]
    cols = offs_d[None, :]
    k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    k = tl.load(k_base + k_rows * stride_kt + cols * stride_kd, mask=mask_k, other=0.0)
    v = tl.load(v_base + k_rows * stride_vt + cols * stride_vd, mask=mask_k, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)

    offset = k_len - q_len
    n_first = tile * BLOCK_N
    n_last = tl.minimum(n_first + BLOCK_N, k_len) - 1
    start, m_left, m_full, m_all = window_query_blocks(
        n_first, n_last, q_len, k_len, window_size, BLOCK_M, 1, CAUSAL, WINDOWED
    )
    scale_log2 = scale * LOG2E
    for g in range(GROUP):
        head = (kv_head * GROUP + g).to(tl.int64)
        q_base = q_ptr + batch * stride_qb + head * stride_qh
        g_base = dout_ptr + batch * stride_gb + head * stride_gh
        row_base = (batch * num_heads + head) * num_q
        if VARLEN:
            q_base += q_start.to(tl.int64) * stride_qt
            g_base += q_start.to(tl.int64) * stride_gt
            row_base += q_start
        if CAUSAL:
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_base, g_base, lse_ptr + row_base, delta_ptr + row_base,
                scale_log2, stride_qt, stride_qd, stride_gt, stride_gd, key,
                start, m_left, q_len, offset, window_size,
                True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_M, BLOCK_D, PRECISION, 1,
            )  # fmt: skip
        dk, dv = _dkdv_blocks(
            dk, dv, k, v, q_base, g_base, lse_ptr + row_base, delta_ptr + row_base,
            scale_log2, stride_qt, stride_qd, stride_gt, stride_gd, key,
            start + m_left * BLOCK_M, m_full - m_left, q_len, offset, window_size,
            False, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_M, BLOCK_D, PRECISION, NUM_STAGES,
        )  # fmt: skip
        dk, dv = _dkdv_blocks(
            dk, dv, k, v, q_base, g_base, lse_ptr + row_base, delta_ptr + row_base,
            scale_log2, stride_qt, stride_qd, stride_gt, stride_gd, key,
            start + m_full * BLOCK_M, m_all - m_full, q_len, offset, window_size,
            True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_M, BLOCK_D, PRECISION, 1,
        )  # fmt: skip

    if HAS_SINK_KEYS and n_first < num_sink:
        sink_row = (seq.to(tl.int64) * tl.num_programs(1) + kv_head) * num_sink + key
        sink_ptrs = sink_row[:, None] * HEAD_DIM + cols
        mask_sink = (key < num_sink)[:, None] & mask_k
        dk += tl.load(sink_dk_ptr + sink_ptrs, mask=mask_sink, other=0.0)
        dv += tl.load(sink_dv_ptr + sink_ptrs, mask=mask_sink, other=0.0)
    dk *= scale
    if HAS_TERMS:
        slot = tl.load(slots_ptr + k_start + key, mask=key < k_len, other=-1)  # [BLOCK_N]
        term_row = batch * stride_tb + slot.to(tl.int64)[:, None] * stride_tt
        term_row += kv_head.to(tl.int64) * stride_th
        mask_t = mask_k & (slot >= 0)[:, None]
        tl.store(term_dk_ptr + term_row + cols, dk, mask=mask_t)
        tl.store(term_dv_ptr + term_row + cols, dv, mask=mask_t)
    head_dk = dk_ptr + batch * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    head_dv = dv_ptr + batch * stride_dvb + kv_head.to(tl.int64) * stride_dvh
    tl.store(head_dk + k_rows * stride_dkt + cols, dk.to(dk_ptr.dtype.element_ty), mask=mask_k)
    tl.store(head_dv + k_rows * stride_dvt + cols, dv.to(dv_ptr.dtype.element_ty), mask=mask_k)


@triton.jit
def _dq_blocks(
    dq, q, dout, lse, delta,
    k_ptr, v_ptr,
    scale_log2,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    pos, first_key, num_blocks, key_end, num_sink, window_size,
    PHASE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add ``num_blocks`` blocks of keys from ``first_key`` on to ``dq`` (phases as forward)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    dims = (offs_d < HEAD_DIM)[None, :]
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    for block in tl.range(0, num_blocks, num_stages=NUM_STAGES):
        key = first_key + block * BLOCK_N + offs_n  # [BLOCK_N]
        row = key.to(tl.int64)
        k_ptrs = k_ptr + row[:, None] * stride_kt + offs_d[None, :] * stride_kd
        v_ptrs = v_ptr + row[:, None] * stride_vt + offs_d[None, :] * stride_vd
        inside = (key < key_end)[:, None]
        k = load_tile(k_ptrs, inside, dims, PHASE != 0, PADDED)  # [BLOCK_N, BLOCK_D]
        v = load_tile(v_ptrs, inside, dims, PHASE != 0, PADDED)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if PHASE != 0:
            seen = (key < key_end)[None, :]
            if PHASE == 1:
                seen = seen & visible(
                    pos[:, None], key[None, :], num_sink, window_size, CAUSAL, WINDOWED, True
                )
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


@triton.jit
def sink_window_bwd_dq_kernel(
    dq_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    tiles_ptr,
    scale, num_sink, window_size,
    stride_dqb, stride_dqt, stride_dqh,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_SINK_KEYS: tl.constexpr, VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``dq`` of ``BLOCK_M`` rows of one head.  Grid as in the forward kernel."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    if VARLEN:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        if seq < 0:
            return
    batch, q_start, q_len, k_start, k_len = sequence_bounds(
        seq, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_q, num_k, VARLEN
    )
    batch = batch.to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    row_first = tile * BLOCK_M
    offs_m = row_first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < q_len
    mask_q = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_rows = (q_start + offs_m).to(tl.int64)
    cols = offs_d[None, :]
    q_base = q_ptr + batch * stride_qb + head.to(tl.int64) * stride_qh
    g_base = dout_ptr + batch * stride_gb + head.to(tl.int64) * stride_gh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    if VARLEN:
        k_base += k_start.to(tl.int64) * stride_kt
        v_base += k_start.to(tl.int64) * stride_vt
    q = tl.load(q_base + q_rows[:, None] * stride_qt + cols * stride_qd, mask=mask_q, other=0.0)
    dout = tl.load(g_base + q_rows[:, None] * stride_gt + cols * stride_gd, mask=mask_q, other=0.0)
    row_base = (batch * num_heads + head) * num_q
    lse = tl.load(lse_ptr + row_base + q_rows, mask=mask_m, other=0.0) * LOG2E  # [BLOCK_M]
    delta = tl.load(delta_ptr + row_base + q_rows, mask=mask_m, other=0.0)  # [BLOCK_M]

    offset = k_len - q_len
    pos = offs_m + offset  # [BLOCK_M]
    p_first = row_first + offset
    p_last = tl.minimum(row_first + BLOCK_M, q_len) - 1 + offset
    start, n_left, n_full, n_all = window_key_blocks(
        p_first, p_last, k_len, window_size, BLOCK_N, CAUSAL, WINDOWED
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    scale_log2 = scale * LOG2E
    if HAS_SINK_KEYS:
        sink_end = tl.minimum(num_sink, start)
        dq = _dq_blocks(
            dq, q, dout, lse, delta, k_base, v_base, scale_log2,
            stride_kt, stride_kd, stride_vt, stride_vd, pos,
            0, tl.cdiv(sink_end, BLOCK_S), sink_end, num_sink, window_size,
            2, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_S, BLOCK_D, PRECISION, 1,
        )  # fmt: skip
    if WINDOWED:
        dq = _dq_blocks(
            dq, q, dout, lse, delta, k_base, v_base, scale_log2,
            stride_kt, stride_kd, stride_vt, stride_vd, pos,
            start, n_left, k_len, num_sink, window_size,
            1, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, 1,
        )  # fmt: skip
    dq = _dq_blocks(
        dq, q, dout, lse, delta, k_base, v_base, scale_log2,
        stride_kt, stride_kd, stride_vt, stride_vd, pos,
        start + n_left * BLOCK_N, n_full - n_left, k_len, num_sink, window_size,
        0, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, NUM_STAGES,
    )  # fmt: skip
    dq = _dq_blocks(
        dq, q, dout, lse, delta, k_base, v_base, scale_log2,
        stride_kt, stride_kd, stride_vt, stride_vd, pos,
        start + n_full * BLOCK_N, n_all - n_full, k_len, num_sink, window_size,
        1, CAUSAL, False, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, 1,
    )  # fmt: skip
    head_dq = dq_ptr + batch * stride_dqb + head.to(tl.int64) * stride_dqh
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(head_dq + q_rows[:, None] * stride_dqt + cols, dq, mask=mask_q)

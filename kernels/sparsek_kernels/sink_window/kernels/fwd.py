"""Forward kernel of sink + sliding-window attention, for every GPU that Triton knows.

For one query row with visible keys ``V`` (FlashAttention-2, arXiv 2307.08691, algorithm 1):

    out = sum_{j in V} exp(s_j - lse) v_j,   s_j = scale q . k_j,
    lse = log(exp(sink) + sum_{j in V} exp(s_j))

Keys between the sinks and the window are never touched.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.loading import load_tile
from sparsek_kernels.common.kernels.masks import visible, window_key_blocks
from sparsek_kernels.common.kernels.sequences import sequence_bounds
from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_finish, softmax_init, softmax_step


@triton.jit
def _attend_blocks(
    acc, m, total, q,
    k_ptr, v_ptr,
    scale_log2,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    pos, first_key, num_blocks, key_end, num_sink, window_size,
    PHASE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over ``num_blocks`` blocks of keys from ``first_key`` on.

    ``PHASE`` 0: every key is visible; 1: window masks; 2: sink keys, all visible up to
    ``key_end``.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    for block in tl.range(0, num_blocks, num_stages=NUM_STAGES):
        key = first_key + block * BLOCK_N + offs_n  # [BLOCK_N]
        row = key.to(tl.int64)
        k_ptrs = k_ptr + row[None, :] * stride_kt + offs_d[:, None] * stride_kd
        v_ptrs = v_ptr + row[:, None] * stride_vt + offs_d[None, :] * stride_vd
        mask_n = key < key_end
        k = load_tile(k_ptrs, mask_n[None, :], mask_d[:, None], PHASE != 0, PADDED)
        v = load_tile(v_ptrs, mask_n[:, None], mask_d[None, :], PHASE != 0, PADDED)
        scores = tl.dot(q, k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if PHASE != 0:
            seen = (key < key_end)[None, :]
            if PHASE == 1:
                seen = seen & visible(
                    pos[:, None], key[None, :], num_sink, window_size, CAUSAL, WINDOWED, True
                )
            scores = tl.where(seen, scores, float("-inf"))
        m, total, p, alpha = softmax_step(m, total, scores, scale_log2, PHASE != 0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return acc, m, total


@triton.jit
def sink_window_fwd_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tiles_ptr,
    scale, num_sink, window_size,
    stride_ob, stride_ot, stride_oh, stride_od,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_SINK_KEYS: tl.constexpr, HAS_SINKS: tl.constexpr, STORE_LSE: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` query rows of one head of one sequence.

    Grid ``(query blocks, heads, batch)``, or ``(tiles, heads, 1)`` with ``VARLEN``.  The last
    query blocks, which see the most keys, start first.
    """
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
    kv_head = head // GROUP
    row_first = tile * BLOCK_M
    offs_m = row_first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_q = (offs_m < q_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_rows = (q_start + offs_m).to(tl.int64)
    q_base = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    k_base = k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    if VARLEN:
        k_base += k_start.to(tl.int64) * stride_kt
        v_base += k_start.to(tl.int64) * stride_vt
    q_ptrs = q_base + q_rows[:, None] * stride_qt + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=mask_q, other=0.0)  # [BLOCK_M, BLOCK_D]

    offset = k_len - q_len
    pos = offs_m + offset  # [BLOCK_M]
    p_first = row_first + offset
    p_last = tl.minimum(row_first + BLOCK_M, q_len) - 1 + offset
    start, n_left, n_full, n_all = window_key_blocks(
        p_first, p_last, k_len, window_size, BLOCK_N, CAUSAL, WINDOWED
    )
    sink_logit = 0.0
    if HAS_SINKS:
        sink_logit = tl.load(sinks_ptr + head).to(tl.float32)
    m, total = softmax_init(sink_logit, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)  # [BLOCK_M, BLOCK_D]
    scale_log2 = scale * LOG2E

    if HAS_SINK_KEYS:
        sink_end = tl.minimum(num_sink, start)
        acc, m, total = _attend_blocks(
            acc, m, total, q, k_base, v_base, scale_log2,
            stride_kt, stride_kd, stride_vt, stride_vd, pos,
            0, tl.cdiv(sink_end, BLOCK_S), sink_end, num_sink, window_size,
            2, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_S, BLOCK_D, PRECISION, 1,
        )  # fmt: skip
    if WINDOWED:
        acc, m, total = _attend_blocks(
            acc, m, total, q, k_base, v_base, scale_log2,
            stride_kt, stride_kd, stride_vt, stride_vd, pos,
            start, n_left, k_len, num_sink, window_size,
            1, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, 1,
        )  # fmt: skip
    acc, m, total = _attend_blocks(
        acc, m, total, q, k_base, v_base, scale_log2,
            stride_kt, stride_kd, stride_vt, stride_vd, pos,
        start + n_left * BLOCK_N, n_full - n_left, k_len, num_sink, window_size,
        0, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, NUM_STAGES,
    )  # fmt: skip
    acc, m, total = _attend_blocks(
        acc, m, total, q, k_base, v_base, scale_log2,
            stride_kt, stride_kd, stride_vt, stride_vd, pos,
        start + n_full * BLOCK_N, n_all - n_full, k_len, num_sink, window_size,
        1, CAUSAL, False, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, 1,
    )  # fmt: skip

    inv_l, lse = softmax_finish(m, total)
    acc = acc * inv_l[:, None]
    out_base = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_base + q_rows[:, None] * stride_ot + offs_d[None, :] * stride_od
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_q)
    if STORE_LSE:
        lse_base = lse_ptr + (batch.to(tl.int64) * num_heads + head) * num_q
        tl.store(lse_base + q_rows, lse, mask=offs_m < q_len)

"""Backward kernels of block-sparse attention.

With ``p_ij = exp(s_ij - lse_i)`` and ``delta_i = sum_d out_id dout_id - dlse_i``
(FlashAttention-2, arXiv 2307.08691, section 3.1.2 and algorithm 2):

    dv_j = sum_i z_ij p_ij dout_i       ds_ij = p_ij (z_ij dout_i . v_j - delta_i)
    dk_j = scale sum_i ds_ij q_i        dq_i  = scale sum_j ds_ij k_j

``z_ij`` is 1 without dropout, else 0 for a dropped weight and ``scale_kept`` for the others.

Queries read the pattern by rows, keys by columns: each gradient has one owner, so nothing is added
atomically and results are the same bits every time.
"""

import triton
import triton.language as tl

from sparsek_kernels.block_sparse.kernels.tiles import (
    attending,
    blocks_below,
    listed_tokens,
    packed_rows,
)
from sparsek_kernels.common.kernels.dropout import dropout_state, kept_weights
from sparsek_kernels.common.kernels.loading import load_tile
from sparsek_kernels.common.kernels.softmax import LOG2E


@triton.jit
def _dkdv_tokens(
    dk, dv, k, v,
    q_ptr, dout_ptr, lse_ptr, delta_ptr, row_ptr, query_mask_ptr,
    scale_log2, scale_kept, seed, draw, drop_below, plane,
    stride_qt, stride_qd,
    stride_gt, stride_gd,
    key, begin, first, end, num_tiles, num_q, offset,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_QUERY_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add ``num_tiles`` tiles of listed queries, from the ``first`` one on, to ``dk``, ``dv``."""
    offs_d = tl.arange(0, BLOCK_D)
    dims = (offs_d < HEAD_DIM)[None, :]
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    CHECKED: tl.constexpr = MASKED or HAS_QUERY_MASK
    for step in tl.range(0, num_tiles, num_stages=NUM_STAGES):
        token, inside = listed_tokens(
            row_ptr, begin, first + step * BLOCK_M, end, BLOCK, BLOCK_M, MASKED
        )
        row = token.to(tl.int64)
        q_ptrs = q_ptr + row[:, None] * stride_qt + offs_d[None, :] * stride_qd
        g_ptrs = dout_ptr + row[:, None] * stride_gt + offs_d[None, :] * stride_gd
        if CHECKED:
            inside = attending(query_mask_ptr, row, inside & (token < num_q), HAS_QUERY_MASK)
        q = load_tile(q_ptrs, inside[:, None], dims, CHECKED, PADDED)  # [BLOCK_M, BLOCK_D]
        dout = load_tile(g_ptrs, inside[:, None], dims, CHECKED, PADDED)  # [BLOCK_M, BLOCK_D]
        lse = load_tile(lse_ptr + row, inside, True, CHECKED, False) * LOG2E  # [BLOCK_M]
        delta = load_tile(delta_ptr + row, inside, True, CHECKED, False)  # [BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if CHECKED:
            seen = inside[None, :]
            if CAUSAL and MASKED:
                seen = seen & (key[:, None] <= (token + offset)[None, :])
            p = tl.where(seen, p, 0.0)
        weights = p
        if DROPOUT:
            planes = tl.zeros([BLOCK_M], dtype=tl.int64) + plane
            kept = tl.trans(
                kept_weights(seed, draw, drop_below, planes, token, key, BLOCK_M, key.shape[0])
            )  # [BLOCK_N, BLOCK_M]
            weights = tl.where(kept, p, 0.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        if DROPOUT:
            dp = tl.where(kept, dp * scale_kept, 0.0)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@triton.jit
def block_sparse_bwd_dkdv_kernel(
    dk_ptr, dv_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, ccol_ptr, row_ptr,
    key_mask_ptr, query_mask_ptr, rng_ptr,
    scale, scale_kept, drop_below,
    stride_dkb, stride_dkt, stride_dkh,
    stride_dvb, stride_dvt, stride_dvh,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads, num_cols, pattern_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One program: ``dk`` and ``dv`` of ``ROWS`` keys of one KV head, over its whole group.

    Grid ``(KV heads * key tiles, batch)``, heads fastest.  Under causality the first keys have the
    longest lists.  These lists start first for every head, so that none runs on alone at the end.
    """
    tile = tl.program_id(0) // (num_heads // GROUP)
    kv_head = tl.program_id(0) % (num_heads // GROUP)
    batch = tl.program_id(1).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    key = tile * ROWS + offs_n  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    exists = (offs_n < ROWS) & (key < num_k)  # [BLOCK_N]
    mask_k = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    k_rows = key.to(tl.int64)[:, None]
    seen = attending(key_mask_ptr, batch * num_k + key, exists, HAS_KEY_MASK)  # [BLOCK_N]
    unpadded = mask_k & seen[:, None]
    cols = offs_d[None, :]
    k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    k = tl.load(k_base + k_rows * stride_kt + cols * stride_kd, mask=unpadded, other=0.0)
    v = tl.load(v_base + k_rows * stride_vt + cols * stride_vd, mask=unpadded, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)

    offset = num_k - num_q
    key_first = tl.maximum(tile * ROWS - offset, 0)  # first query that sees a key of the tile
    key_last = tl.maximum(tl.minimum(tile * ROWS + ROWS, num_k) - 1 - offset, 0)  # ... all of them
    scale_log2 = scale * LOG2E
    query_mask = query_mask_ptr + batch * num_q
    seed, draw = dropout_state(rng_ptr, DROPOUT)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        ccol = ccol_ptr + (head // pattern_heads) * (num_cols + 1) + tile * ROWS // BLOCK
        begin = tl.load(ccol)
        end = tl.load(ccol + 1)
        masked = 0
        if CAUSAL:
            hidden = blocks_below(row_ptr, begin, end, key_first // BLOCK)
            masked = blocks_below(row_ptr, begin, end, tl.cdiv(key_last, BLOCK)) - hidden
            begin += hidden
        whole = blocks_below(row_ptr, begin + masked, end, num_q // BLOCK)
        full = whole * BLOCK // BLOCK_M
        wide = head.to(tl.int64)
        q_base = q_ptr + batch * stride_qb + wide * stride_qh
        g_base = dout_ptr + batch * stride_gb + wide * stride_gh
        plane = batch * num_heads + wide
        stats = plane * num_q
        if CAUSAL:
            dk, dv = _dkdv_tokens(
                dk, dv, k, v, q_base, g_base, lse_ptr + stats, delta_ptr + stats, row_ptr,
                query_mask, scale_log2, scale_kept, seed, draw, drop_below, plane,
                stride_qt, stride_qd, stride_gt, stride_gd, key,
                begin, 0, masked * BLOCK, tl.cdiv(masked * BLOCK, BLOCK_M), num_q, offset,
                True, CAUSAL, HEAD_DIM, BLOCK, BLOCK_M, BLOCK_D, PRECISION, 1,
            HAS_QUERY_MASK, DROPOUT,
            )  # fmt: skip
        begin += masked
        tokens = (end - begin) * BLOCK
        dk, dv = _dkdv_tokens(
            dk, dv, k, v, q_base, g_base, lse_ptr + stats, delta_ptr + stats, row_ptr,
            query_mask, scale_log2, scale_kept, seed, draw, drop_below, plane,
            stride_qt, stride_qd, stride_gt, stride_gd, key,
            begin, 0, tokens, full, num_q, offset,
            False, CAUSAL, HEAD_DIM, BLOCK, BLOCK_M, BLOCK_D, PRECISION, NUM_STAGES,
            HAS_QUERY_MASK, DROPOUT,
        )  # fmt: skip
        dk, dv = _dkdv_tokens(
            dk, dv, k, v, q_base, g_base, lse_ptr + stats, delta_ptr + stats, row_ptr,
            query_mask, scale_log2, scale_kept, seed, draw, drop_below, plane,
            stride_qt, stride_qd, stride_gt, stride_gd, key,
            begin, full * BLOCK_M, tokens, tl.cdiv(tokens - full * BLOCK_M, BLOCK_M), num_q,
            offset, True, CAUSAL, HEAD_DIM, BLOCK, BLOCK_M, BLOCK_D, PRECISION, 1,
            HAS_QUERY_MASK, DROPOUT,
        )  # fmt: skip

    head_dk = dk_ptr + batch * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    head_dv = dv_ptr + batch * stride_dvb + kv_head.to(tl.int64) * stride_dvh
    if HAS_KEY_MASK:
        dk = tl.where(seen[:, None], dk, 0.0)
        dv = tl.where(seen[:, None], dv, 0.0)
    if DROPOUT:
        dv = dv * scale_kept
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(head_dk + k_rows * stride_dkt + cols, dk, mask=mask_k)
    tl.store(head_dv + k_rows * stride_dvt + cols, dv.to(dv_ptr.dtype.element_ty), mask=mask_k)


@triton.jit
def _dq_tokens(
    dq, q, dout, lse, delta,
    k_ptr, v_ptr, col_ptr, key_mask_ptr,
    scale_log2, scale_kept, seed, draw, drop_below, plane, token,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    pos, begin, first, end, num_tiles, num_k,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add ``num_tiles`` tiles of listed keys, from the ``first`` one on, to ``dq``."""
    offs_d = tl.arange(0, BLOCK_D)
    dims = (offs_d < HEAD_DIM)[None, :]
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    CHECKED: tl.constexpr = MASKED or HAS_KEY_MASK
    for step in tl.range(0, num_tiles, num_stages=NUM_STAGES):
        key, inside = listed_tokens(
            col_ptr, begin, first + step * BLOCK_N, end, BLOCK, BLOCK_N, MASKED
        )
        row = key.to(tl.int64)
        k_ptrs = k_ptr + row[:, None] * stride_kt + offs_d[None, :] * stride_kd
        v_ptrs = v_ptr + row[:, None] * stride_vt + offs_d[None, :] * stride_vd
        if CHECKED:
            inside = attending(key_mask_ptr, key, inside & (key < num_k), HAS_KEY_MASK)
        k = load_tile(k_ptrs, inside[:, None], dims, CHECKED, PADDED)  # [BLOCK_N, BLOCK_D]
        v = load_tile(v_ptrs, inside[:, None], dims, CHECKED, PADDED)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if CHECKED:
            seen = inside[None, :]
            if CAUSAL and MASKED:
                seen = seen & (key[None, :] <= pos[:, None])
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if DROPOUT:
            kept = kept_weights(
                seed, draw, drop_below, plane, token, key, q.shape[0], BLOCK_N
            )  # [BLOCK_M, BLOCK_N]
            dp = tl.where(kept, dp * scale_kept, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq


@triton.jit
def block_sparse_bwd_dq_kernel(
    dq_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, crow_ptr, col_ptr,
    key_mask_ptr, query_mask_ptr, rng_ptr,
    scale, scale_kept, drop_below,
    stride_dqb, stride_dqt, stride_dqh,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads, num_rows, pattern_heads,
    GROUP: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One program: ``dq`` of a query tile.  Grid and rows as in the forward kernel."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    packs = tl.cdiv(GROUP, PACK)
    kv_head = tl.program_id(1) // packs
    batch = tl.program_id(2).to(tl.int64)
    in_group, token, exists = packed_rows(
        tile, tl.program_id(1) % packs, num_q, GROUP, PACK, ROWS, BLOCK_M
    )
    head = (kv_head * GROUP + in_group).to(tl.int64)  # [BLOCK_M]
    row = token.to(tl.int64)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_q = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    attends = attending(query_mask_ptr, batch * num_q + row, exists, HAS_QUERY_MASK)  # [BLOCK_M]
    unpadded = mask_q & attends[:, None]
    q_rows = q_ptr + batch * stride_qb + head * stride_qh + row * stride_qt
    g_rows = dout_ptr + batch * stride_gb + head * stride_gh + row * stride_gt
    q = tl.load(q_rows[:, None] + offs_d[None, :] * stride_qd, mask=unpadded, other=0.0)
    dout = tl.load(g_rows[:, None] + offs_d[None, :] * stride_gd, mask=unpadded, other=0.0)
    plane = batch * num_heads + head  # [BLOCK_M]
    stats = plane * num_q + row  # [BLOCK_M]
    lse = tl.load(lse_ptr + stats, mask=attends, other=0.0) * LOG2E  # [BLOCK_M]
    delta = tl.load(delta_ptr + stats, mask=attends, other=0.0)  # [BLOCK_M]
    k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh

    first_head = kv_head * GROUP + tl.program_id(1) % packs * PACK
    crow = crow_ptr + (first_head // pattern_heads) * (num_rows + 1) + tile * ROWS // BLOCK
    begin = tl.load(crow)
    end = tl.load(crow + 1)
    offset = num_k - num_q
    pos = token + offset  # [BLOCK_M]
    whole = num_k
    if CAUSAL:
        whole = tl.minimum(tl.maximum(tile * ROWS + offset + 1, 0), num_k)
        last = tl.minimum(tile * ROWS + ROWS, num_q) + offset
        end = begin + blocks_below(col_ptr, begin, end, tl.cdiv(tl.maximum(last, 0), BLOCK))
    full = blocks_below(col_ptr, begin, end, whole // BLOCK) * BLOCK // BLOCK_N
    tokens = (end - begin) * BLOCK

    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    scale_log2 = scale * LOG2E
    key_mask = key_mask_ptr + batch * num_k
    seed, draw = dropout_state(rng_ptr, DROPOUT)
    dq = _dq_tokens(
        dq, q, dout, lse, delta, k_base, v_base, col_ptr, key_mask,
        scale_log2, scale_kept, seed, draw, drop_below, plane, token,
        stride_kt, stride_kd, stride_vt, stride_vd, pos,
        begin, 0, tokens, full, num_k,
        False, CAUSAL, HEAD_DIM, BLOCK, BLOCK_N, BLOCK_D, PRECISION, NUM_STAGES,
        HAS_KEY_MASK, DROPOUT,
    )  # fmt: skip
    dq = _dq_tokens(
        dq, q, dout, lse, delta, k_base, v_base, col_ptr, key_mask,
        scale_log2, scale_kept, seed, draw, drop_below, plane, token,
        stride_kt, stride_kd, stride_vt, stride_vd, pos,
        begin, full * BLOCK_N, tokens, tl.cdiv(tokens - full * BLOCK_N, BLOCK_N), num_k,
        True, CAUSAL, HEAD_DIM, BLOCK, BLOCK_N, BLOCK_D, PRECISION, 1,
        HAS_KEY_MASK, DROPOUT,
    )  # fmt: skip
    dq_rows = dq_ptr + batch * stride_dqb + head * stride_dqh + row * stride_dqt
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_rows[:, None] + offs_d[None, :], dq, mask=mask_q)

"""Forward kernel of block-sparse attention.

For one query row whose pattern row lists the key blocks ``V`` (FlashAttention-2, arXiv 2307.08691,
algorithm 1; block-sparse as in Child et al., arXiv 1904.10509, section 5):

    out = sum_{j in V} exp(s_j - lse) v_j,   s_j = scale q . k_j,   lse = log sum_{j in V} exp(s_j)

Blocks that are not listed are never touched.  With dropout, the sum of ``out`` leaves dropped keys
out and multiplies the others by ``scale_kept``; ``lse`` does not change.
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
from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_finish, softmax_init, softmax_step


@triton.jit
def _attend_tokens(
    acc, m, total, q,
    k_ptr, v_ptr, col_ptr, key_mask_ptr,
    scale_log2, seed, draw, drop_below, plane, token,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    pos, begin, first, end, num_tiles, num_k,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Online softmax over ``num_tiles`` tiles of listed keys, from the ``first`` one on."""
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    CHECKED: tl.constexpr = MASKED or HAS_KEY_MASK
    for step in tl.range(0, num_tiles, num_stages=NUM_STAGES):
        key, inside = listed_tokens(
            col_ptr, begin, first + step * BLOCK_N, end, BLOCK, BLOCK_N, MASKED
        )
        row = key.to(tl.int64)
        k_ptrs = k_ptr + row[None, :] * stride_kt + offs_d[:, None] * stride_kd
        v_ptrs = v_ptr + row[:, None] * stride_vt + offs_d[None, :] * stride_vd
        if CHECKED:
            inside = attending(key_mask_ptr, key, inside & (key < num_k), HAS_KEY_MASK)
        k = load_tile(k_ptrs, inside[None, :], mask_d[:, None], CHECKED, PADDED)
        v = load_tile(v_ptrs, inside[:, None], mask_d[None, :], CHECKED, PADDED)
        scores = tl.dot(q, k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if CHECKED:
            seen = inside[None, :]
            if CAUSAL and MASKED:
                seen = seen & (key[None, :] <= pos[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        m, total, p, alpha = softmax_step(m, total, scores, scale_log2, CHECKED)
        if DROPOUT:
            kept = kept_weights(
                seed, draw, drop_below, plane, token, key, acc.shape[0], BLOCK_N
            )  # [BLOCK_M, BLOCK_N]
            p = tl.where(kept, p, 0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return acc, m, total


@triton.jit
def block_sparse_fwd_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, crow_ptr, col_ptr,
    key_mask_ptr, query_mask_ptr, rng_ptr,
    scale, scale_kept, drop_below,
    stride_ob, stride_ot, stride_oh, stride_od,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, num_heads, num_rows, pattern_heads,
    GROUP: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` query tokens of ``PACK`` heads of a group, which share a pattern row.

    Grid ``(query tiles, KV heads x packs, batch)``; the last tiles, which see the most keys under
    causality, start first.
    """
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
    q_rows = q_ptr + batch * stride_qb + head * stride_qh + row * stride_qt
    q = tl.load(
        q_rows[:, None] + offs_d[None, :] * stride_qd, mask=mask_q & attends[:, None], other=0.0
    )
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

    m, total = softmax_init(0.0, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)  # [BLOCK_M, BLOCK_D]
    scale_log2 = scale * LOG2E
    key_mask = key_mask_ptr + batch * num_k
    plane = batch * num_heads + head  # [BLOCK_M]
    seed, draw = dropout_state(rng_ptr, DROPOUT)
    acc, m, total = _attend_tokens(
        acc, m, total, q, k_base, v_base, col_ptr, key_mask,
        scale_log2, seed, draw, drop_below, plane, token,
        stride_kt, stride_kd, stride_vt, stride_vd, pos,
        begin, 0, tokens, full, num_k,
        False, CAUSAL, HEAD_DIM, BLOCK, BLOCK_N, BLOCK_D, PRECISION, NUM_STAGES,
        HAS_KEY_MASK, DROPOUT,
    )  # fmt: skip
    acc, m, total = _attend_tokens(
        acc, m, total, q, k_base, v_base, col_ptr, key_mask,
        scale_log2, seed, draw, drop_below, plane, token,
        stride_kt, stride_kd, stride_vt, stride_vd, pos,
        begin, full * BLOCK_N, tokens, tl.cdiv(tokens - full * BLOCK_N, BLOCK_N), num_k,
        True, CAUSAL, HEAD_DIM, BLOCK, BLOCK_N, BLOCK_D, PRECISION, 1,
        HAS_KEY_MASK, DROPOUT,
    )  # fmt: skip

    inv_l, lse = softmax_finish(m, total)
    if DROPOUT:
        inv_l = inv_l * scale_kept
    acc = acc * inv_l[:, None]
    if HAS_QUERY_MASK:
        lse = tl.where(attends, lse, float("-inf"))
        acc = tl.where(attends[:, None], acc, 0.0)
    out_rows = out_ptr + batch * stride_ob + head * stride_oh + row * stride_ot
    out_ptrs = out_rows[:, None] + offs_d[None, :] * stride_od
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_q)
    tl.store(lse_ptr + (batch * num_heads + head) * num_q + row, lse, mask=exists)

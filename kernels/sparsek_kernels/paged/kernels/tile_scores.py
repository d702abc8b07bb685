"""Scores of prefill tiles: probabilities of blocks, summed over a tile's queries and heads.

Two forms of one rule (docs/selection.md).  ``tile_scores_kernel`` goes over the summaries twice
and spreads a tile over several programs, for steps with few tiles.  ``tile_scores_once_kernel``
goes over them once: it parks ``2 ** (logit - running maximum)`` of its current tile in a scratch of
its own, and weighs the parked rows when their denominators are known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.select import block_logits, cell_pages
from sparsek_kernels.paged.kernels.tiles import TOP_K, tile_sees_all, tile_span


@triton.jit
def load_queries(
    q_ptr,
    position,
    mask_m,
    head,
    offs_d,
    mask_d,
    token_of_zero,
    stride_qt,
    stride_qh,
    MIN_MAX: tl.constexpr,
):
    """Rows of q; with ``MIN_MAX`` their positive and negative parts.  ``[BLOCK_M, BLOCK_D]``."""
    row = (token_of_zero + position).to(tl.int64) * stride_qt + head * stride_qh
    q = tl.load(
        q_ptr + row[:, None] + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0
    )
    q_low = q
    if MIN_MAX:
        q_low = tl.minimum(q, 0.0).to(q.dtype)
        q = tl.maximum(q, 0.0).to(q.dtype)
    return q, q_low


@triton.jit
def add_scores(pointers, total, mask, FIRST):
    """Store ``total``, added to what an earlier row chunk of this program left."""
    earlier = tl.load(pointers, mask=mask & (not FIRST), other=0.0)
    tl.debug_barrier()
    tl.store(pointers, total + earlier, mask=mask)
    tl.debug_barrier()


@triton.jit
def tile_scores_once_kernel(
    scores_ptr,
    parked_ptr,
    parked_max_ptr,
    q_ptr,
    summary_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    max_steps,
    stride_qt,
    stride_qh,
    stride_sp,
    stride_sh,
    stride_sc,
    stride_br,
    stride_ot,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    POLICY_TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
    MIN_MAX: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """A program takes every ``num_programs``-th pair of tile and KV head.

    ``parked_ptr``: ``[programs, max_steps, BLOCK_M, BLOCK_B]``, values in ``[0, 1]``; fp32 for fp32
    queries, so that what they select does not show which kernel scored them, else fp16;
    ``parked_max_ptr``: ``[programs, max_steps, BLOCK_M]`` fp32, the maxima they refer to.  Neither
    grows with the step's tokens.
    """
    HEAD_CHUNKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    ROW_CHUNKS: tl.constexpr = HEAD_CHUNKS * ((POLICY_TILE + QUERIES - 1) // QUERIES)
    pid = tl.program_id(0)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = tl.arange(0, BLOCK_B)
    mask_d = offs_d < HEAD_DIM
    parked = parked_ptr + pid.to(tl.int64) * max_steps * BLOCK_M * BLOCK_B
    parked += offs_m[:, None] * BLOCK_B + offs_k[None, :]
    parked_max = parked_max_ptr + pid.to(tl.int64) * max_steps * BLOCK_M + offs_m
    # parked steps are read back several at a time
    STEPS: tl.constexpr = 64 // BLOCK_B if BLOCK_B < 64 else 1
    WIDE: tl.constexpr = STEPS * BLOCK_B
    offs_w = tl.arange(0, WIDE)
    offs_s = tl.arange(0, STEPS)
    parked_wide = parked_ptr + pid.to(tl.int64) * max_steps * BLOCK_M * BLOCK_B
    parked_wide += offs_m[:, None] * BLOCK_B
    parked_wide += ((offs_w // BLOCK_B) * (BLOCK_M * BLOCK_B) + offs_w % BLOCK_B)[None, :]
    parked_maxima = parked_max_ptr + pid.to(tl.int64) * max_steps * BLOCK_M
    parked_maxima += offs_m[:, None] + offs_s[None, :] * BLOCK_M
    for work in range(pid, num_tiles * NUM_KV_HEADS, tl.num_programs(0)):
        local = work % num_tiles
        kv_head = (work // num_tiles).to(tl.int64)
        request, base, low, high, token_of_zero = tile_span(
            first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, POLICY_TILE
        )
        full = tile_sees_all(
            base,
            dense_below,
            TOP_K,
            POLICY_TILE,
            SEL_BLOCK,
            SINK_BLOCKS,
            REACH_BLOCKS,
            SCORED_BLOCKS,
        )
        num_blocks = tl.where((high < low) | full, 0, high // SEL_BLOCK)
        table = block_table_ptr + request.to(tl.int64) * stride_br
        summary = summary_ptr + kv_head * stride_sh
        scores = scores_ptr + local.to(tl.int64) * stride_ot + kv_head * stride_oh
        row_chunks = tl.where(num_blocks > 0, ROW_CHUNKS, 0)
        for chunk in range(row_chunks):
            member = (chunk % HEAD_CHUNKS) * BLOCK_H + offs_m % BLOCK_H
            query = (chunk // HEAD_CHUNKS) * QUERIES + offs_m // BLOCK_H
            position = base + query
            mask_m = (offs_m < QUERIES * BLOCK_H) & (member < GROUP) & (query < POLICY_TILE)
            mask_m = mask_m & (position >= low) & (position <= high)
            own = tl.where(mask_m, position // SEL_BLOCK, 0)
            q, q_low = load_queries(
                q_ptr,
                position,
                mask_m,
                kv_head * GROUP + member,
                offs_d,
                mask_d,
                token_of_zero,
                stride_qt,
                stride_qh,
                MIN_MAX,
            )
            row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
            row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            page = cell_pages(table, 0, num_blocks, BLOCK_B, PAGE_SIZE, SEL_BLOCK, MIN_MAX)
            for b in tl.range(0, num_blocks, BLOCK_B, num_stages=NUM_STAGES):
                next_page = cell_pages(
                    table, b + BLOCK_B, num_blocks, BLOCK_B, PAGE_SIZE, SEL_BLOCK, MIN_MAX
                )
                logits = block_logits(
                    q,
                    q_low,
                    summary,
                    page,
                    b,
                    num_blocks,
                    offs_d,
                    mask_d,
                    stride_sp,
                    stride_sc,
                    BLOCK_B,
                    PAGE_SIZE,
                    SEL_BLOCK,
                    MIN_MAX,
                )
                page = next_page
                offs_b = b + offs_k
                if SEL_BLOCK % POLICY_TILE != 0:
                    valid = offs_b[None, :] < own[:, None]
                else:
                    valid = (offs_b < num_blocks)[None, :]
                logits = tl.where(valid, logits, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(logits, axis=1) * qk_scale)
                weights = tl.exp2(logits * qk_scale - new_max[:, None])
                row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(weights, axis=1)
                row_max = new_max
                step = b // BLOCK_B
                tl.store(
                    parked + step * (BLOCK_M * BLOCK_B), weights.to(parked_ptr.dtype.element_ty)
                )
                tl.store(parked_max + step * BLOCK_M, row_max)
            # base-2 log of the denominator; rows without a query get probability zero
            lse = tl.where(mask_m & (row_sum > 0.0), row_max + tl.log2(row_sum), 1.0e30)
            tl.debug_barrier()
            for b in tl.range(0, num_blocks, WIDE, num_stages=4):
                first_step = b // BLOCK_B
                offs_b = b + offs_w
                weights = tl.load(
                    parked_wide + first_step * (BLOCK_M * BLOCK_B),
                    mask=(b + offs_w // BLOCK_B * BLOCK_B < num_blocks)[None, :],
                    other=0.0,
                ).to(tl.float32)  # [BLOCK_M, WIDE]
                maxima = tl.load(
                    parked_maxima + first_step * BLOCK_M,
                    mask=((first_step + offs_s) * BLOCK_B < num_blocks)[None, :],
                    other=-1.0e30,
                )  # [BLOCK_M, STEPS]
                scale = tl.exp2(maxima - lse[:, None])
                shaped = tl.reshape(weights, [BLOCK_M, STEPS, BLOCK_B]) * scale[:, :, None]
                total = tl.reshape(tl.sum(shaped, axis=0), [WIDE])
                if ROW_CHUNKS > 1:
                    add_scores(scores + offs_b, total, offs_b < num_blocks, chunk == 0)
                else:
                    tl.store(scores + offs_b, total, mask=offs_b < num_blocks)
            tl.debug_barrier()


@triton.jit
def tile_scores_kernel(
    scores_ptr,
    state_ptr,
    q_ptr,
    summary_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    stride_qt,
    stride_qh,
    stride_sp,
    stride_sh,
    stride_sc,
    stride_br,
    stride_ot,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    POLICY_TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
    MIN_MAX: tl.constexpr,
    SECOND_PASS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One prefill tile, KV head and share of the context, in one of two passes.

    First pass: maximum and sum of ``2 ** logit`` per row (query, head), to ``state_ptr``
    ``[tiles, Hkv, row chunks, SPLITS, 2, BLOCK_M]``.  Second pass: probabilities summed over the
    rows, to ``scores_ptr`` ``[tiles, Hkv, blocks]``.  Neither keeps a row of logits.
    """
    local = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    request, base, low, high, token_of_zero = tile_span(
        first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, POLICY_TILE
    )
    if high < low:
        return
    full = tile_sees_all(
        base, dense_below, TOP_K, POLICY_TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if full:
        return
    num_blocks = high // SEL_BLOCK
    per_split = tl.cdiv(tl.cdiv(num_blocks, SPLITS), BLOCK_B) * BLOCK_B
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_blocks)

    HEAD_CHUNKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    ROW_CHUNKS: tl.constexpr = HEAD_CHUNKS * ((POLICY_TILE + QUERIES - 1) // QUERIES)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    table = block_table_ptr + request.to(tl.int64) * stride_br
    summary = summary_ptr + kv_head * stride_sh
    state_row = (local * NUM_KV_HEADS + kv_head) * ROW_CHUNKS
    scores = scores_ptr + local.to(tl.int64) * stride_ot + kv_head * stride_oh
    for chunk in range(ROW_CHUNKS):
        member = (chunk % HEAD_CHUNKS) * BLOCK_H + offs_m % BLOCK_H
        query = (chunk // HEAD_CHUNKS) * QUERIES + offs_m // BLOCK_H
        position = base + query
        mask_m = (offs_m < QUERIES * BLOCK_H) & (member < GROUP)
        mask_m = mask_m & (position >= low) & (position <= high) & (position < base + POLICY_TILE)
        own = tl.where(mask_m, position // SEL_BLOCK, 0)
        q, q_low = load_queries(
            q_ptr,
            position,
            mask_m,
            kv_head * GROUP + member,
            offs_d,
            mask_d,
            token_of_zero,
            stride_qt,
            stride_qh,
            MIN_MAX,
        )
        row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        state = state_ptr + (state_row + chunk) * SPLITS * 2 * BLOCK_M + offs_m
        if SECOND_PASS:
            for s in range(SPLITS):
                part_max = tl.load(state + (2 * s) * BLOCK_M)
                part_sum = tl.load(state + (2 * s + 1) * BLOCK_M)
                new_max = tl.maximum(row_max, part_max)
                row_sum = row_sum * tl.exp2(row_max - new_max)
                row_sum += part_sum * tl.exp2(part_max - new_max)
                row_max = new_max
            # base-2 log of the denominator; rows without a query get probability zero
            lse = tl.where(mask_m & (row_sum > 0.0), row_max + tl.log2(row_sum), 1.0e30)
        page = cell_pages(table, begin, end, BLOCK_B, PAGE_SIZE, SEL_BLOCK, MIN_MAX)
        for b in tl.range(begin, end, BLOCK_B, num_stages=NUM_STAGES):
            next_page = cell_pages(table, b + BLOCK_B, end, BLOCK_B, PAGE_SIZE, SEL_BLOCK, MIN_MAX)
            logits = block_logits(
                q,
                q_low,
                summary,
                page,
                b,
                end,
                offs_d,
                mask_d,
                stride_sp,
                stride_sc,
                BLOCK_B,
                PAGE_SIZE,
                SEL_BLOCK,
                MIN_MAX,
            )
            page = next_page
            offs_b = b + tl.arange(0, BLOCK_B)
            mask_b = offs_b < end
            if SECOND_PASS:
                prob = tl.exp2(logits * qk_scale - lse[:, None])
                if SEL_BLOCK % POLICY_TILE != 0:
                    prob = tl.where(offs_b[None, :] < own[:, None], prob, 0.0)
                total = tl.sum(prob, axis=0)  # [BLOCK_B]
                if ROW_CHUNKS > 1:
                    add_scores(scores + offs_b, total, mask_b, chunk == 0)
                else:
                    tl.store(scores + offs_b, total, mask=mask_b)
            else:
                if SEL_BLOCK % POLICY_TILE != 0:
                    valid = offs_b[None, :] < own[:, None]
                    logits = tl.where(valid, logits, float("-inf"))
                elif b + BLOCK_B > end:
                    logits = tl.where(mask_b[None, :], logits, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(logits, axis=1) * qk_scale)
                row_sum = row_sum * tl.exp2(row_max - new_max)
                row_sum += tl.sum(tl.exp2(logits * qk_scale - new_max[:, None]), axis=1)
                row_max = new_max
        if not SECOND_PASS:
            tl.store(state + (2 * split) * BLOCK_M, row_max)
            tl.store(state + (2 * split + 1) * BLOCK_M, row_sum)

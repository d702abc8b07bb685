"""Choosing blocks by score: probabilities from logits, exact top-n.

The rule is docs/selection.md.  Logits are kept in base 2 (scaled by ``log2(e)``) throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.sample import SPREAD, draw, first_key_of, first_sum
from sparsek_kernels.paged.kernels.tiles import (
    TOP_K,
    listed_places,
    tile_places,
    tile_sees_all,
    tile_span,
)


@triton.jit
def lower_and_higher(low_a, high_a, low_b, high_b):
    """Combine of a joint minimum and maximum."""
    return tl.minimum(low_a, low_b), tl.maximum(high_a, high_b)


@triton.jit
def best_of(score, first, last, COUNT, BLOCK: tl.constexpr):
    """Which entries of ``[first, last)`` are the ``COUNT`` best, and the place of each among them.

    score: ``[BLOCK]``, non-negative floats, whose bits order as integers: the ``COUNT``-th largest
    is found by counting, a third of the range at a time, and winners are placed by one prefix sum.
    Ties go to the lower entry.  Needs ``last - first >= COUNT``.  Returns two ``[BLOCK]``.

    ``store_best`` of NSA has a loop of its own: here many warps share a row, so a pass takes two
    counts in one sum, and winners are flags of single entries.
    """
    offs = tl.arange(0, BLOCK)
    # NaN and negative scores count as zero: whatever q holds, COUNT valid entries come out.
    score = tl.where(score > 0.0, score, 0.0)
    inside = (offs >= first) & (offs < last)
    key = tl.where(inside, score.to(tl.int32, bitcast=True), -1)
    # The answer lies in [threshold, threshold + span]; `count` keys reach the threshold.
    threshold, highest = tl.reduce((tl.where(inside, key, 0x7FFFFFFF), key), 0, lower_and_higher)
    span = highest - threshold
    count = last - first
    while (span > 0) & (count != COUNT):
        step = span // 3 + 1
        upper = key >= threshold + 2 * step
        lower = key >= threshold + step
        if BLOCK < 32768:  # two counts in one sum
            packed = tl.sum(lower.to(tl.int32) + (upper.to(tl.int32) << 16), axis=0)
            count_1 = packed & 0xFFFF
            count_2 = packed >> 16
        else:
            count_1 = tl.sum(lower.to(tl.int32), axis=0)
            count_2 = tl.sum(upper.to(tl.int32), axis=0)
        steps = (count_1 >= COUNT).to(tl.int32) + (count_2 >= COUNT).to(tl.int32)
        count = tl.where(steps == 2, count_2, tl.where(steps == 1, count_1, count))
        threshold += steps * step
        span = tl.where(steps == 2, span - 2 * step, step - 1)
    # `exact`: just COUNT keys reach the threshold; else it is the COUNT-th largest key itself, and
    # as many of the keys equal to it as places are left win, the first ones.
    exact = count == COUNT
    above = (key > threshold) | ((key == threshold) & exact)
    equal = (key == threshold) & (not exact)
    if BLOCK < 32768:
        ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        rank_above = ranks & 0xFFFF
        rank_equal = ranks >> 16
    else:
        rank_above = tl.cumsum(above.to(tl.int32), axis=0)
        rank_equal = tl.cumsum(equal.to(tl.int32), axis=0)
    needed = COUNT
    if not exact:
        needed = COUNT - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (equal & (rank_equal <= needed))
    return chosen, rank_above + tl.minimum(rank_equal, needed) - 1


@triton.jit
def sum_of_probabilities(
    logit_ptr, stride_sg, num_blocks, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Softmax of each head's logits over ``num_blocks`` blocks, added up over the heads.

    Up to 8,192 blocks are read once, a few heads at a time.  More would not fit into registers:
    each head is then read for its total, and again for its probabilities.  Returns ``[BLOCK]``.
    """
    offs = tl.arange(0, BLOCK)
    score = tl.zeros([BLOCK], dtype=tl.float32)
    if BLOCK <= 8192:
        WIDE: tl.constexpr = triton.next_power_of_2(GROUP)
        MOST: tl.constexpr = 4 if BLOCK <= 4096 else 2
        STEP: tl.constexpr = WIDE if WIDE < MOST else MOST
        for first_head in tl.static_range(0, GROUP, STEP):
            head = first_head + tl.arange(0, STEP)
            live = (head < GROUP)[:, None]
            logit = tl.load(
                logit_ptr + head[:, None] * stride_sg + offs[None, :],
                mask=live & (offs < num_blocks)[None, :],
                other=float("-inf"),
            )  # [STEP, BLOCK]
            top = tl.max(logit, axis=1)
            weight = tl.exp2(logit - tl.where(head < GROUP, top, 0.0)[:, None])
            total = tl.sum(weight, axis=1)
            weight = weight * tl.where(head < GROUP, 1.0 / total, 0.0)[:, None]
            score += tl.sum(weight, axis=0)
    else:
        CHUNK: tl.constexpr = 4096
        lane = tl.arange(0, CHUNK)
        for head in tl.range(0, GROUP):
            logits = logit_ptr + head * stride_sg
            # finite, so that lanes without a block add nothing and no difference is NaN
            tops = tl.full([CHUNK], -1.0e30, dtype=tl.float32)
            totals = tl.zeros([CHUNK], dtype=tl.float32)
            for first in tl.range(0, num_blocks, CHUNK):
                logit = tl.load(
                    logits + first + lane, mask=first + lane < num_blocks, other=float("-inf")
                )
                higher = tl.maximum(tops, logit)
                totals = totals * tl.exp2(tops - higher) + tl.exp2(logit - higher)
                tops = higher
            top = tl.max(tops, axis=0)
            inverse = 1.0 / tl.sum(totals * tl.exp2(tops - top), axis=0)
            logit = tl.load(logits + offs, mask=offs < num_blocks, other=float("-inf"))
            score += tl.exp2(logit - top) * inverse
    return score


@triton.jit
def write_top(
    out_ptr, score_ptr,
    stride_sg,
    num_blocks, first, last, position, count,
    GROUP: tl.constexpr, FROM_LOGITS: tl.constexpr, COUNT: tl.constexpr, DRAW_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the ``COUNT`` best of blocks ``[first, last)``, ascending; ties to the lower index.

    With ``DRAW_ROWS``, a sample of ``count`` of them (``draw``).
    """
    offs = tl.arange(0, BLOCK)
    if FROM_LOGITS:
        score = sum_of_probabilities(score_ptr, stride_sg, num_blocks, GROUP, BLOCK)
    else:
        score = tl.load(score_ptr + offs, mask=offs < num_blocks, other=0.0)
    if DRAW_ROWS:
        inside = (offs >= first) & (offs < last)
        start = first_sum(position, SPREAD)
        first_key = first_key_of(count, DRAW_ROWS)
        draw(out_ptr, score, offs, inside, start, 0, first_key, count, COUNT)
    else:
        chosen, rank = best_of(score, first, last, COUNT, BLOCK)
        tl.store(out_ptr + rank, offs, mask=chosen)


@triton.jit(do_not_specialize=["dense_below", "first_tile"])
def top_blocks_kernel(
    out_ptr, score_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, width,
    stride_ot, stride_oh,
    stride_st, stride_sh, stride_sg,
    FROM_TABLE: tl.constexpr, TILES_PER_REQUEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, FROM_LOGITS: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
    GROWTH: tl.constexpr, COUNT: tl.constexpr, DRAW_ROWS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A single token's selection for one KV head, its best blocks, or a tile's candidates, a sample
    of blocks.  ``DRAW_ROWS`` are the rows of a tile whose probabilities its scores add up, 0 for
    tokens.

    Single tokens have logits by query head (``FROM_LOGITS``), ``stride_sg`` apart, or summed
    scores, and write their row of the output, -1 where they see everything.  Tiles (``FROM_TABLE``)
    have summed scores, and write ``COUNT`` entries of candidates from ``first_tile`` on, -1 where
    there are fewer, nothing where they see everything.
    A row has ``width`` scores; blocks past it do not compete.  ``MAX_BLOCKS`` bounds the blocks of
    any sequence; shorter ones take a narrower path.
    """
    local = tl.program_id(0)
    kv_head = tl.program_id(1)
    _request, base, low, high, token_of_zero = tile_span(
        first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, FROM_TABLE, TILES_PER_REQUEST,
        TILE,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if high < low:
        return
    row = local if FROM_TABLE else token_of_zero + low
    out = out_ptr + row.to(tl.int64) * stride_ot + kv_head * stride_oh
    full = tile_sees_all(
        base, dense_below, TOP_K, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if full | (high < 0):
        if not FROM_TABLE:
            NONE: tl.constexpr = triton.next_power_of_2(COUNT)
            none = tl.arange(0, NONE)
            tl.store(out + none, tl.full([NONE], -1, tl.int32), mask=none < COUNT)
        return
    first = SINK_BLOCKS
    last = tl.minimum(base // SEL_BLOCK - REACH_BLOCKS, width)
    count = COUNT
    if GROWTH is not None:
        count = listed_places(tile_places(base, SEL_BLOCK, SCORED_BLOCKS, GROWTH))
    if last - first <= count:  # all of them: their scores do not matter
        WIDTH: tl.constexpr = triton.next_power_of_2(COUNT)
        offs = tl.arange(0, WIDTH)
        block = tl.where(first + offs < last, first + offs, -1)
        tl.store(out + offs, block, mask=offs < COUNT)
        return
    scores = score_ptr + local.to(tl.int64) * stride_st + kv_head.to(tl.int64) * stride_sh
    num_blocks = tl.minimum(high // SEL_BLOCK, width)
    if (MAX_BLOCKS <= 1024) | (num_blocks <= 1024):
        SMALL: tl.constexpr = 1024 if MAX_BLOCKS > 1024 else MAX_BLOCKS
        write_top(
            out, scores, stride_sg, num_blocks, first, last, base, count, GROUP, FROM_LOGITS,
            COUNT, DRAW_ROWS, SMALL,
        )  # fmt: skip
    elif (MAX_BLOCKS <= 4096) | (num_blocks <= 4096):
        MEDIUM: tl.constexpr = 4096 if MAX_BLOCKS > 4096 else MAX_BLOCKS
        write_top(
            out, scores, stride_sg, num_blocks, first, last, base, count, GROUP, FROM_LOGITS,
            COUNT, DRAW_ROWS, MEDIUM,
        )  # fmt: skip
    elif (MAX_BLOCKS <= 16384) | (num_blocks <= 16384):
        LARGE: tl.constexpr = 16384 if MAX_BLOCKS > 16384 else MAX_BLOCKS
        write_top(
            out, scores, stride_sg, num_blocks, first, last, base, count, GROUP, FROM_LOGITS,
            COUNT, DRAW_ROWS, LARGE,
        )  # fmt: skip
    else:
        write_top(
            out, scores, stride_sg, num_blocks, first, last, base, count, GROUP, FROM_LOGITS,
            COUNT, DRAW_ROWS, MAX_BLOCKS,
        )  # fmt: skip

"""Scores of prefill tiles by means of keys, summed over the samples of a tile and a group's heads.

The rule is docs/selection.md, "Scores".  A *cell* is 16 tokens, and a *part* is a few query
heads of a few samples of a tile: rows that are scored together.  Three kernels follow each other:

* ``pool_means_kernel`` pools the keys of every cell into means;
* ``part_scores_kernel`` scores the blocks for each part, in two passes: the rows' denominators,
  then the sums of their probabilities (or ``tile_scores_sm90.py`` does in one pass, of samples
  that ``gather_samples_kernel`` lays together);
* ``add_parts_kernel`` adds up the parts of each tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.tiles import TOP_K, tile_sees_all, tile_span

BLOCKS_AT_ONCE: tl.constexpr = tl.constexpr(32)
"""Blocks whose means lie together, ordered by cell, then block."""


@triton.jit
def sample_positions(
    row, base, low, high,
    TILE: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Query position of each row of the tile at ``base``, -1 for rows that are none.

    Rows are samples times ``HEADS``.  A tile has a sample for every ``STRIDE`` positions: the last
    of them that is a query.
    """
    sample = row // HEADS
    first = base + sample * STRIDE
    position = tl.minimum(tl.minimum(first + STRIDE, base + TILE) - 1, high)
    there = (sample < SAMPLES) & (position >= low) & (position >= first)
    return tl.where(there, position, -1)


@triton.jit
def mean_row(block, cell, CELLS: tl.constexpr):
    """Row of a cell's mean: first cells of 32 blocks, their second cells, and so on.

    Columns of a product then come in that order, and a maximum over the cells of a block stays
    within a thread.
    """
    return (block // BLOCKS_AT_ONCE * CELLS + cell) * BLOCKS_AT_ONCE + block % BLOCKS_AT_ONCE


@triton.jit(do_not_specialize=["dense_below", "first_request", "stride_mr", "stride_mh"])
def pool_means_kernel(
    means_ptr, k_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request,
    stride_mr, stride_mh,
    stride_kp, stride_kh, stride_kt,
    stride_br,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Means of ``BLOCK_C`` cells of one request and KV head, from the pages.

    Writes ``means [requests, Hkv, rows, D]``, rows by :func:`mean_row`.  Cells of the block of the
    last token, and requests whose tiles all see everything, are left out.
    """
    CELLS: tl.constexpr = SEL_BLOCK // 16
    cell = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    kv_head = tl.program_id(1).to(tl.int64)
    local = tl.program_id(2)
    request = first_request + local
    last = tl.load(seq_lens_ptr + request).to(tl.int32) - 1
    first_token = tl.load(cu_seqlens_ptr + request).to(tl.int32)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1).to(tl.int32) - first_token
    num_cells = last // SEL_BLOCK * CELLS
    full = tile_sees_all(
        last // TILE * TILE, dense_below, TOP_K,
        TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    if (num_tokens <= 0) | (tl.program_id(0) * BLOCK_C >= num_cells) | full:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = (cell < num_cells)[:, None] & (offs_d < HEAD_DIM)[None, :]
    token = cell * 16  # of one page: pages hold whole cells
    table = block_table_ptr + request.to(tl.int64) * stride_br
    page = tl.load(table + token // PAGE_SIZE, mask=cell < num_cells, other=0).to(tl.int64)
    row = page * stride_kp + kv_head * stride_kh + (token % PAGE_SIZE) * stride_kt
    keys = k_ptr + row[:, None] + offs_d[None, :]
    total = tl.zeros([BLOCK_C, BLOCK_D], dtype=tl.float32)
    for i in tl.static_range(16):
        total += tl.load(keys + i * stride_kt, mask=mask, other=0.0).to(tl.float32)
    means = means_ptr + local.to(tl.int64) * stride_mr + kv_head * stride_mh
    place = mean_row(cell // CELLS, cell % CELLS, CELLS)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(means + place, (total * (1.0 / 16)).to(means_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scored_span(
    tile,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request, num_requests,
    TILE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
):  # fmt: skip
    """``(request - first_request, base, low, high, token of zero)`` of a tile that needs scores.

    Tiles that see everything, or belong to none of the requests, have ``high < low``.
    """
    request, base, low, high, token_of_zero = tile_span(
        tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, TILE
    )
    full = tile_sees_all(
        base, dense_below, TOP_K, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    local = request - first_request
    other = (local < 0) | (local >= num_requests)
    high = tl.where(full | other, low - 1, high)
    return local, base, low, high, token_of_zero


@triton.jit(
    do_not_specialize=["dense_below", "first_tile", "first_request", "num_requests", "width"]
)
def gather_samples_kernel(
    out_ptr, seen_ptr, plan_ptr, q_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, first_request, num_requests, width,
    stride_qt, stride_qh,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    SAMPLES: tl.constexpr, STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The samples of one tile, of ``HEADS`` query heads of one KV head, as rows of a matrix.

    Grid ``(tiles, Hkv * parts)``, for parts of ``HEADS`` heads.  Writes ``[tiles, Hkv, parts,
    SAMPLES * HEADS, D]``, sample by sample, zeros for rows that are none, and to ``seen`` the
    blocks before each row's own, ``width`` at most (0: no row).  ``plan [tiles, 3]`` gets the
    tile's request, and the most and the fewest blocks before a sample's own; both are 0 for tiles
    that need no scores, which get nothing else.
    """
    ROWS: tl.constexpr = SAMPLES * HEADS
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile = tl.program_id(0)
    part = tl.program_id(1)
    local, base, low, high, token_of_zero = scored_span(
        first_tile + tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_request,
        num_requests, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    position = sample_positions(row, base, low, high, TILE, SAMPLES, STRIDE, HEADS)
    own = tl.minimum(position // SEL_BLOCK, width)  # a row of scores has no more
    if part == 0:
        some = high >= low
        most = tl.max(tl.where(position >= 0, own, 0), axis=0)
        fewest = tl.min(tl.where(position >= 0, own, most), axis=0)
        tl.store(plan_ptr + 3 * tile, local)
        tl.store(plan_ptr + 3 * tile + 1, tl.where(some, most, 0))
        tl.store(plan_ptr + 3 * tile + 2, tl.where(some, fewest, 0))
    if high < low:
        return
    member = part % PARTS * HEADS + row % HEADS
    live = (position >= 0) & (member < GROUP)
    offs_d = tl.arange(0, HEAD_DIM)
    from_row = (token_of_zero + position).to(tl.int64) * stride_qt
    from_row += (part // PARTS * GROUP + member).to(tl.int64) * stride_qh
    q = tl.load(q_ptr + from_row[:, None] + offs_d[None, :], mask=live[:, None], other=0.0)
    to_row = (tile * tl.num_programs(1) + part).to(tl.int64) * ROWS + row
    tl.store(out_ptr + to_row[:, None] * HEAD_DIM + offs_d[None, :], q)
    tl.store(seen_ptr + to_row, tl.where(live, own, 0))


@triton.jit(
    do_not_specialize=[
        "dense_below",
        "first_tile",
        "first_request",
        "num_requests",
        "width",
        "stride_mr",
        "stride_mh",
    ]
)
def part_scores_kernel(
    parts_ptr, state_ptr, q_ptr, means_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, dense_below, first_tile, first_request, num_requests, width,
    stride_qt, stride_qh,
    stride_mr, stride_mh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, TILE: tl.constexpr,
    SAMPLES: tl.constexpr, STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr, SECOND_PASS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One part of a tile, one KV head and a share of the blocks, in one of two passes.

    First pass: maximum and sum of ``2 ** logit`` of each row, to ``state [tiles, Hkv, parts,
    splits, 2, BLOCK_M]``.  Second pass: probabilities summed over the rows, to ``parts [tiles, Hkv,
    parts, width]``.  The work is two products of q and the means: 4 D operations for each row and
    cell, and two exponentials for each row and block.
    """
    CELLS: tl.constexpr = SEL_BLOCK // 16
    HEAD_PARTS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    PARTS: tl.constexpr = HEAD_PARTS * ((SAMPLES + QUERIES - 1) // QUERIES)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    kv_head = tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    local, base, low, high, token_of_zero = scored_span(
        first_tile + tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
        dense_below, first_request, num_requests,
        TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    if high < low:
        return
    offs_m = tl.arange(0, BLOCK_M)
    member = part % HEAD_PARTS * BLOCK_H + offs_m % BLOCK_H
    row = part // HEAD_PARTS * (QUERIES * BLOCK_H) + offs_m
    position = sample_positions(row, base, low, high, TILE, SAMPLES, STRIDE, BLOCK_H)
    live = (member < GROUP) & (offs_m < QUERIES * BLOCK_H) & (position >= 0)
    own = tl.where(live, tl.minimum(position // SEL_BLOCK, width), 0)  # a row has no more
    num_blocks = tl.max(own, axis=0)
    if num_blocks == 0:
        return
    share = tl.cdiv(tl.cdiv(num_blocks, splits), BLOCK_B) * BLOCK_B
    begin = split * share
    end = tl.minimum(begin + share, num_blocks)
    offs_b = tl.arange(0, BLOCK_B)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    q_row = (token_of_zero + position).to(tl.int64) * stride_qt
    q_row += (kv_head * GROUP + member).to(tl.int64) * stride_qh
    q = tl.load(
        q_ptr + q_row[:, None] + offs_d[None, :], mask=live[:, None] & mask_d[None, :], other=0.0
    )  # [BLOCK_M, BLOCK_D]
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    place = ((tile * tl.num_programs(1) + kv_head) * PARTS + part).to(tl.int64)
    state = state_ptr + place * (splits * 2 * BLOCK_M) + offs_m
    if SECOND_PASS:
        for s in range(splits):
            part_max = tl.load(state + (2 * s) * BLOCK_M)
            part_sum = tl.load(state + (2 * s + 1) * BLOCK_M)
            new_max = tl.maximum(row_max, part_max)
            row_sum = row_sum * tl.exp2(row_max - new_max) + part_sum * tl.exp2(part_max - new_max)
            row_max = new_max
        # base-2 log of the denominator; rows that see no block give nothing
        some = row_sum > 0.0
        lse = tl.where(some, row_max + tl.log2(tl.where(some, row_sum, 1.0)), 1.0e30)
    means = means_ptr + local.to(tl.int64) * stride_mr + kv_head.to(tl.int64) * stride_mh
    out = parts_ptr + place * width
    logits = tl.zeros([BLOCK_M, BLOCK_B], dtype=tl.float32)
    steps = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_B) * CELLS
    for step in tl.range(0, steps, num_stages=NUM_STAGES):
        block = begin + step // CELLS * BLOCK_B + offs_b
        cell = step % CELLS
        rows = means + mean_row(block, cell, CELLS)[:, None] * HEAD_DIM
        mean = tl.load(
            rows + offs_d[None, :], mask=(block < end)[:, None] & mask_d[None, :], other=0.0
        )  # [BLOCK_B, BLOCK_D]
        product = tl.dot(q, tl.trans(mean), input_precision="ieee")
        logits = tl.where(cell == 0, product, tl.maximum(logits, product))
        if cell == CELLS - 1:
            valid = (block[None, :] < own[:, None]) & (block < end)[None, :]
            scaled = tl.where(valid, logits * qk_scale, float("-inf"))
            if SECOND_PASS:
                tl.store(
                    out + block, tl.sum(tl.exp2(scaled - lse[:, None]), axis=0), mask=block < end
                )
            else:
                new_max = tl.maximum(row_max, tl.max(scaled, axis=1))
                row_sum = row_sum * tl.exp2(row_max - new_max)
                row_sum += tl.sum(tl.exp2(scaled - new_max[:, None]), axis=1)
                row_max = new_max
    if not SECOND_PASS:
        tl.store(state + (2 * split) * BLOCK_M, row_max)
        tl.store(state + (2 * split + 1) * BLOCK_M, row_sum)


@triton.jit(
    do_not_specialize=["dense_below", "first_tile", "first_request", "num_requests", "width"]
)
def add_parts_kernel(
    scores_ptr, parts_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, first_request, num_requests, width,
    QUERIES: tl.constexpr, HEAD_PARTS: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr,
    TILE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores ``[tiles, Hkv, width]`` of ``BLOCK`` blocks: the sum of the parts that hold samples.

    Blocks before the tile's first query are written: all candidates are among them.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    block = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    _local, base, low, high, _token = scored_span(
        first_tile + tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
        dense_below, first_request, num_requests,
        TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    num_blocks = tl.minimum(base // SEL_BLOCK, width)  # a row has no more
    if (high < low) | (tl.program_id(2) * BLOCK >= num_blocks):
        return
    first = (low - base) // (STRIDE * QUERIES) * HEAD_PARTS
    last = ((high - base) // (STRIDE * QUERIES) + 1) * HEAD_PARTS
    row = (tile * tl.num_programs(1) + kv_head).to(tl.int64)
    parts = parts_ptr + row * PARTS * width + block
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(first, last):
        total += tl.load(parts + part * width, mask=block < num_blocks, other=0.0)
    tl.store(scores_ptr + row * width + block, total, mask=block < num_blocks)

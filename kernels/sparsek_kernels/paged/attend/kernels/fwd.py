"""Flash attention of query tiles over lists of cache blocks, for prefill and split-KV decode."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.common.kernels.split_kv import add_splits
from sparsek_kernels.paged.attend.kernels.cells import attend_sample
from sparsek_kernels.paged.attend.kernels.pieces import attend_pieces
from sparsek_kernels.paged.kernels.tiles import (
    DENSE,
    SINK_WINDOW,
    tile_list,
    tile_places,
    tile_sees_all,
    tile_span,
)


@triton.jit
def tile_rows(
    first, low, high, token_of_zero, kv_head, head_chunk,
    ROWS: tl.constexpr, LIVE: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows of a tile: member of the group, position, head, token and whether it is there.

    first: position of the first row; low, high: positions of the tile's first and last query.
    """
    row = tl.arange(0, ROWS)
    member = head_chunk * BLOCK_H + row % BLOCK_H
    position = first + row // BLOCK_H
    there = (row < LIVE) & (member < GROUP) & (position >= low) & (position <= high)
    head = kv_head * GROUP + member
    return member, position, head, (token_of_zero + position).to(tl.int64), there


@triton.jit(do_not_specialize=["splits"])
def attend_kernel(
    out_ptr, lse_ptr, part_ptr, state_ptr, ticket_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr, selected_ptr,
    tiles_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, v_scale, bounds, splits, out_strides, q_strides, k_strides, v_strides,
    selected_strides,
    stride_br,
    RULE: tl.constexpr, SHAPE: tl.constexpr, TILING: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``QUERIES`` queries x ``BLOCK_H`` heads of a KV head over one share of the tile's blocks.

    Row ``m`` is query ``m // BLOCK_H``, head ``m % BLOCK_H``.  ``splits`` programs share a tile;
    each leaves an unnormalised output with its row maxima and sums, and the program that draws the
    last ticket adds them up in split order, so the result does not depend on timing.

    With ``SHARDED``, pages of other ranks (-1 in the block table) are left out, and the natural
    log-sum-exps of the logits are written too, ``[T, Hq]`` float32, -inf where no key is here.
    """
    MODE: tl.constexpr = RULE.MODE
    TILE: tl.constexpr = RULE.TILE
    POLICY_TILE: tl.constexpr = RULE.POLICY_TILE
    SEL_BLOCK: tl.constexpr = RULE.SEL_BLOCK
    SINK_BLOCKS: tl.constexpr = RULE.SINK_BLOCKS
    REACH_BLOCKS: tl.constexpr = RULE.REACH_BLOCKS
    SCORED_BLOCKS: tl.constexpr = RULE.SCORED_BLOCKS
    ALIGN: tl.constexpr = RULE.ALIGN
    BY_REQUEST: tl.constexpr = RULE.BY_REQUEST
    FROM_TABLE: tl.constexpr = SHAPE.FROM_TABLE
    TILES_PER_REQUEST: tl.constexpr = SHAPE.TILES_PER_REQUEST
    NUM_KV_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    HAS_SINKS: tl.constexpr = SHAPE.HAS_SINKS
    JOINED: tl.constexpr = SHAPE.JOINED
    SHARDED: tl.constexpr = SHAPE.SHARDED
    QUERIES: tl.constexpr = TILING.QUERIES
    BLOCK_H: tl.constexpr = TILING.BLOCK_H
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    MOST_SPLITS: tl.constexpr = TILING.MOST_SPLITS
    NUM_STAGES: tl.constexpr = TILING.NUM_STAGES
    window, num_sink, dense_below = bounds
    if MOST_SPLITS == 1:
        splits = 1
    stride_ot, stride_oh = out_strides
    stride_qt, stride_qh = q_strides
    stride_kp, stride_kh, stride_kt = k_strides
    stride_vp, stride_vh, stride_vt = v_strides
    stride_it, stride_ih = selected_strides
    HEAD_CHUNKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    QUERY_CHUNKS: tl.constexpr = (TILE + QUERIES - 1) // QUERIES
    CHUNKS: tl.constexpr = HEAD_CHUNKS * QUERY_CHUNKS
    pid = tl.program_id(0)
    tile = pid // CHUNKS
    head_chunk = pid % HEAD_CHUNKS
    query_chunk = (pid // HEAD_CHUNKS) % QUERY_CHUNKS
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    request, base, tile_low, tile_high, token_of_zero = tile_span(
        tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, FROM_TABLE, TILES_PER_REQUEST, TILE
    )
    HAS_SELECTION: tl.constexpr = (MODE != DENSE) and (MODE != SINK_WINDOW) and (SCORED_BLOCKS > 0)
    # Decodes take the selected blocks last: sinks and window are read while the kernel that
    # selects, launched before this one, is still at work.  So do lists of small blocks.
    SMALL: tl.constexpr = SEL_BLOCK < BLOCK_N
    CELLS: tl.constexpr = HAS_SELECTION and RULE.SAMPLE
    SELECTED_LAST: tl.constexpr = HAS_SELECTION and (CELLS or SMALL or not FROM_TABLE)
    if OVERLAP and not SELECTED_LAST:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    low = tl.maximum(tile_low, base + query_chunk * QUERIES)
    high = tl.minimum(tile_high, base + query_chunk * QUERIES + QUERIES - 1)
    if high < low:
        if OVERLAP and SELECTED_LAST:
            tl.extra.cuda.gdc_wait()
        return
    policy_start = base if BY_REQUEST else low // POLICY_TILE * POLICY_TILE
    full = tile_sees_all(
        policy_start, dense_below, MODE, POLICY_TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS,
        SCORED_BLOCKS, ALIGN,
    )  # fmt: skip
    listed = tile_places(policy_start, SEL_BLOCK, SCORED_BLOCKS, RULE.GROWTH)
    num_front, num_selected, first_local, count = tile_list(
        policy_start, low, high, full, window, listed, MODE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS,
        ALIGN,
    )  # fmt: skip
    selection = tile if FROM_TABLE or BY_REQUEST else token_of_zero + low
    selected = selected_ptr + selection.to(tl.int64) * stride_it + kv_head * stride_ih
    if CELLS:
        ends = high // BLOCK_N + 1
        num_front = tl.minimum(tl.cdiv(num_front * SEL_BLOCK, BLOCK_N), ends)
        first_local = tl.minimum(first_local * SEL_BLOCK // BLOCK_N, ends)
        num_forced = num_front + tl.where(full, 0, ends - first_local)
        num_forced = tl.where(count > 0, num_forced, 0)
        num_cells = tl.cdiv(num_selected * SEL_BLOCK, BLOCK_N)  # pieces of the sample
        num_pieces = num_forced + num_cells
    elif SMALL:
        ENTRIES: tl.constexpr = BLOCK_N // SEL_BLOCK
        first_selected = count - num_selected
        num_forced = tl.cdiv(first_selected, ENTRIES)
        num_pieces = num_forced + tl.cdiv(num_selected, ENTRIES)
        num_plain = 0  # where nothing is selected, every piece is masked
    else:
        PARTS: tl.constexpr = SEL_BLOCK // BLOCK_N
        num_pieces = (count - 1) * PARTS + (high % SEL_BLOCK) // BLOCK_N + 1
        num_pieces = tl.where(count > 0, num_pieces, 0)
        num_plain = tl.maximum(num_pieces - (high // BLOCK_N - low // BLOCK_N + 1), 0)
        first_selected = num_front
        if MODE == SINK_WINDOW:
            num_plain = 0
        if SELECTED_LAST:
            first_selected = count - num_selected
            num_pieces = count * PARTS
            num_forced = first_selected * PARTS
    per_split = tl.cdiv(num_pieces, splits)
    piece_begin = split * per_split
    piece_end = tl.minimum(piece_begin + per_split, num_pieces)
    num_parts = tl.cdiv(num_pieces, tl.maximum(per_split, 1))
    if CELLS:
        # Every program has its share of the sample, and of what it reads while that is drawn.
        forced_each, cells_each = tl.cdiv(num_forced, splits), tl.cdiv(num_cells, splits)
        num_parts = tl.cdiv(num_forced, tl.maximum(forced_each, 1))
        num_parts = tl.maximum(num_parts, tl.cdiv(num_cells, tl.maximum(cells_each, 1)))

    LIVE: tl.constexpr = QUERIES * BLOCK_H
    first = base + query_chunk * QUERIES
    member, position, head, token, mask_m = tile_rows(
        first, low, high, token_of_zero, kv_head, head_chunk, BLOCK_M, LIVE, BLOCK_H, GROUP
    )
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    q = tl.load(
        q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & mask_d[None, :],
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    dense_row = (position // POLICY_TILE + 1) * POLICY_TILE <= dense_below
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    table = block_table_ptr + request.to(tl.int64) * stride_br
    k_head = k_ptr + kv_head * stride_kh
    v_head = v_ptr + kv_head * stride_vh
    # Prefills: whole blocks first, then masked ones.  Decodes: the forced blocks, masked, first;
    # selected small ones are masked too, since the list may end within a piece.
    if SELECTED_LAST:
        middle = tl.minimum(tl.maximum(num_forced, piece_begin), piece_end)
    else:
        middle = tl.minimum(tl.maximum(num_plain, piece_begin), piece_end)
    if CELLS:
        acc, row_max, row_sum = attend_sample(
            acc, row_max, row_sum, q, position, k_head, v_head, table, selected,
            (split * forced_each, tl.minimum((split + 1) * forced_each, num_forced)),
            (split * cells_each, tl.minimum((split + 1) * cells_each, num_cells)),
            num_front, first_local, high, qk_scale, k_strides, k_strides if JOINED else v_strides,
            HEAD_DIM, BLOCK_D, BLOCK_N, SEL_BLOCK, SCORED_BLOCKS * SEL_BLOCK, PAGE_SIZE, SHARDED,
            JOINED, SHAPE.UNIT, QUERIES, NUM_STAGES, OVERLAP,
        )  # fmt: skip
    elif MODE != SINK_WINDOW:
        acc, row_max, row_sum = attend_pieces(
            acc, row_max, row_sum, q, position, dense_row,
            k_head, v_head, table, selected,
            piece_begin, middle, num_front, first_selected, num_selected, first_local,
            high, window, num_sink, qk_scale,
            stride_kp, stride_kt, stride_vp, stride_vt,
            HEAD_DIM, BLOCK_D, BLOCK_N, SEL_BLOCK, PAGE_SIZE,
            HAS_SELECTION, SELECTED_LAST, False, SHARDED, NUM_STAGES,
        )  # fmt: skip
    if OVERLAP and SELECTED_LAST and not CELLS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not CELLS:
        acc, row_max, row_sum = attend_pieces(
            acc, row_max, row_sum, q, position, dense_row,
            k_head, v_head, table, selected,
            middle, piece_end, num_front, first_selected, num_selected, first_local,
            high, window, num_sink, qk_scale,
            stride_kp, stride_kt, stride_vp, stride_vt,
            HEAD_DIM, BLOCK_D, BLOCK_N, SEL_BLOCK, PAGE_SIZE,
            HAS_SELECTION, SMALL or not SELECTED_LAST, MODE == SINK_WINDOW, SHARDED,
            NUM_STAGES if (SELECTED_LAST or MODE == SINK_WINDOW) else 1,
        )  # fmt: skip

    if MOST_SPLITS > 1:
        place = ((tile * NUM_KV_HEADS + kv_head) * CHUNKS + pid % CHUNKS).to(tl.int64)
        parts = part_ptr + place * splits * LIVE * BLOCK_D + offs_d[None, :]
        states = state_ptr + place * splits * 2 * LIVE
        rows = tl.arange(0, BLOCK_M)
        tl.store(states + (2 * split) * LIVE + rows, row_max, mask=mask_m)
        tl.store(states + (2 * split + 1) * LIVE + rows, row_sum, mask=mask_m)
        num_parts = tl.maximum(num_parts, 1)
        if split < num_parts:
            mine = parts + (split * LIVE + rows)[:, None] * BLOCK_D
            tl.store(mine, acc, mask=mask_m[:, None] & mask_d[None, :])
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel")
        if ticket != splits - 1:
            return
        tl.store(ticket_ptr + place, 0)
        # Rows that only fill the tile up are left behind: the parts fit in registers then.
        member, position, head, token, mask_m = tile_rows(
            first, low, high, token_of_zero, kv_head, head_chunk, LIVE, LIVE, BLOCK_H, GROUP
        )
        rows = tl.arange(0, LIVE)
        row_max, row_sum, acc = add_splits(
            parts + rows[:, None] * BLOCK_D, states + rows, num_parts, LIVE, BLOCK_D, MOST_SPLITS
        )
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
        sink = sink * LOG2E
        seen = row_sum > 0.0
        top = tl.where(seen, tl.maximum(row_max, sink), 0.0)
        shrink = tl.where(seen, tl.exp2(row_max - top), 0.0)
        row_sum = row_sum * shrink + tl.where(seen, tl.exp2(sink - top), 0.0)
        acc = acc * shrink[:, None]
    if SHARDED:
        lse = tl.where(row_sum > 0.0, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
        tl.store(lse_ptr + token * (NUM_KV_HEADS * GROUP) + head, lse, mask=mask_m)
    inverse = tl.where(row_sum > 0.0, v_scale / row_sum, 0.0)
    result = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_d[None, :],
        result,
        mask=mask_m[:, None] & mask_d[None, :],
    )

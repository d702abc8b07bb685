"""Flash attention of query tiles over lists of cache blocks, for prefill and split-KV decode."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.common.kernels.split_kv import add_splits
from sparsek_kernels.paged.kernels.tiles import (
    DENSE,
    NO_KEY,
    SINK_WINDOW,
    page_of,
    tile_list,
    tile_sees_all,
    tile_span,
)


@triton.jit
def piece_start(
    piece,
    selected_ptr,
    num_front,
    first_selected,
    num_selected,
    first_local,
    SEL_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
):
    """First position of piece ``piece``: ``BLOCK_N`` keys of an entry of the tile's list.

    Selected blocks are entries ``[first_selected, first_selected + num_selected)``; the entries
    before and after them count up from zero, then from ``first_local`` (see ``tile_list``).
    """
    PARTS: tl.constexpr = SEL_BLOCK // BLOCK_N
    t = piece // PARTS
    later = tl.where(t >= first_selected, num_selected, 0)
    block = tl.where(t < num_front, t, first_local + t - num_front - later)
    if HAS_SELECTION:
        chosen = (t >= first_selected) & (t < first_selected + num_selected)
        index = tl.load(selected_ptr + t - first_selected, mask=chosen, other=0)
        block = tl.where(chosen, tl.maximum(index, 0), block)
    return block * SEL_BLOCK + (piece % PARTS) * BLOCK_N


@triton.jit
def piece_keys(
    piece,
    selected_ptr,
    num_front,
    first_selected,
    num_selected,
    first_local,
    SEL_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
):
    """Positions of the keys of piece ``piece``: the next entries of a list of blocks so small that
    ``BLOCK_N`` keys hold several.  ``[BLOCK_N]``

    :func:`piece_start` says which entries a piece has.  Selected entries come last and begin a
    piece; where a piece has no more entries, its keys lie past every query.
    """
    ENTRIES: tl.constexpr = BLOCK_N // SEL_BLOCK
    offs_n = tl.arange(0, BLOCK_N)
    forced = tl.cdiv(first_selected, ENTRIES)
    t = piece * ENTRIES + offs_n // SEL_BLOCK
    block = tl.where(t < num_front, t, first_local + t - num_front)
    there = t < first_selected
    if HAS_SELECTION:
        late = piece >= forced
        t -= forced * ENTRIES
        there = tl.where(late, t < num_selected, there)
        index = tl.load(selected_ptr + t, mask=late & there, other=0)
        block = tl.where(late, tl.maximum(index, 0), block)
    return tl.where(there, block * SEL_BLOCK + offs_n % SEL_BLOCK, NO_KEY)


@triton.jit
def attend_pieces(
    acc,
    row_max,
    row_sum,
    q,
    position,
    dense_row,
    k_ptr,
    v_ptr,
    table_ptr,
    selected_ptr,
    piece_begin,
    piece_end,
    num_front,
    first_selected,
    num_selected,
    first_local,
    high,
    window,
    num_sink,
    qk_scale,
    stride_kp,
    stride_kt,
    stride_vp,
    stride_vt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Online softmax over pieces ``[piece_begin, piece_end)`` of the tile's list of blocks.

    The page of the next piece is looked up one iteration ahead, so that the loads of K and V wait
    for no other load.  ``MASKED`` compares positions (diagonal, window, end of the sequence).
    With ``SHARDED``, pages of other ranks (-1 in the block table) are masked and never read.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    SMALL: tl.constexpr = SEL_BLOCK < BLOCK_N  # several blocks a piece; `start` is then every key's
    WHOLE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    find: tl.constexpr = piece_keys if SMALL else piece_start
    last_piece = piece_end - 1
    start = find(
        piece_begin,
        selected_ptr,
        num_front,
        first_selected,
        num_selected,
        first_local,
        SEL_BLOCK,
        BLOCK_N,
        HAS_SELECTION,
    )
    some = piece_begin < piece_end
    if SMALL:
        page = page_of(table_ptr, start, some & (start <= high), PAGE_SIZE)
    elif WHOLE:
        page = page_of(table_ptr, start, some, PAGE_SIZE)
    else:
        page = page_of(table_ptr, start + offs_n, some & (start + offs_n <= high), PAGE_SIZE)
    for piece in tl.range(piece_begin, piece_end, num_stages=NUM_STAGES):
        next_start = find(
            tl.minimum(piece + 1, last_piece),
            selected_ptr,
            num_front,
            first_selected,
            num_selected,
            first_local,
            SEL_BLOCK,
            BLOCK_N,
            HAS_SELECTION,
        )
        keys = start if SMALL else start + offs_n
        if SMALL:
            next_page = page_of(table_ptr, next_start, next_start <= high, PAGE_SIZE)
            rows = keys % PAGE_SIZE
        elif WHOLE:
            next_page = page_of(table_ptr, next_start, True, PAGE_SIZE)
            rows = (start % PAGE_SIZE) + offs_n
        else:
            next_page = page_of(
                table_ptr, next_start + offs_n, next_start + offs_n <= high, PAGE_SIZE
            )
            rows = keys % PAGE_SIZE
        k_rows = page * stride_kp + rows * stride_kt  # [BLOCK_N]
        v_rows = page * stride_vp + rows * stride_vt
        mask = (keys <= high)[:, None] & mask_d[None, :] if MASKED else mask_d[None, :]
        if SHARDED:
            here = (keys >= 0) & (page >= 0)  # [BLOCK_N]
            mask = mask & here[:, None]
        if MASKED or SHARDED or HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptr + k_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + v_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(k_ptr + k_rows[:, None] + offs_d[None, :])  # [BLOCK_N, BLOCK_D]
            v = tl.load(v_ptr + v_rows[:, None] + offs_d[None, :])  # [BLOCK_N, BLOCK_D]
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = keys[None, :] <= position[:, None]
            if WINDOWED:
                inside = (keys < num_sink)[None, :] | (keys[None, :] > position[:, None] - window)
                visible = visible & (inside | dense_row[:, None])
            logits = tl.where(visible, logits, float("-inf"))
        if SHARDED:
            logits = tl.where(here[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1) * qk_scale)
        weights = tl.exp2(logits * qk_scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        row_max = new_max
        start = next_start
        page = next_page
    return acc, row_max, row_sum


@triton.jit
def attend_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    state_ptr,
    ticket_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    selected_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    v_scale,
    window,
    num_sink,
    dense_below,
    out_strides,
    q_strides,
    k_strides,
    v_strides,
    selected_strides,
    stride_br,
    RULE: tl.constexpr,
    SHAPE: tl.constexpr,
    TILING: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``QUERIES`` queries x ``BLOCK_H`` heads of a KV head over one share of the tile's blocks.

    Row ``m`` is query ``m // BLOCK_H``, head ``m % BLOCK_H``.  ``SPLITS`` programs share a tile;
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
    FROM_TABLE: tl.constexpr = SHAPE.FROM_TABLE
    TILES_PER_REQUEST: tl.constexpr = SHAPE.TILES_PER_REQUEST
    NUM_KV_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    HAS_SINKS: tl.constexpr = SHAPE.HAS_SINKS
    SHARDED: tl.constexpr = SHAPE.SHARDED
    QUERIES: tl.constexpr = TILING.QUERIES
    BLOCK_H: tl.constexpr = TILING.BLOCK_H
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    SPLITS: tl.constexpr = TILING.SPLITS
    NUM_STAGES: tl.constexpr = TILING.NUM_STAGES
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
    SELECTED_LAST: tl.constexpr = HAS_SELECTION and (SMALL or not FROM_TABLE)
    if OVERLAP and not SELECTED_LAST:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    low = tl.maximum(tile_low, base + query_chunk * QUERIES)
    high = tl.minimum(tile_high, base + query_chunk * QUERIES + QUERIES - 1)
    if high < low:
        if OVERLAP and SELECTED_LAST:
            tl.extra.cuda.gdc_wait()
        return
    policy_start = low // POLICY_TILE * POLICY_TILE
    full = tile_sees_all(
        policy_start, dense_below, MODE, POLICY_TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS,
        SCORED_BLOCKS,
    )  # fmt: skip
    num_front, num_selected, first_local, count = tile_list(
        policy_start, low, high, full, window, MODE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS,
        SCORED_BLOCKS,
    )  # fmt: skip
    selection = tile if FROM_TABLE else token_of_zero + low
    selected = selected_ptr + selection.to(tl.int64) * stride_it + kv_head * stride_ih
    if SMALL:
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
    per_split = tl.cdiv(num_pieces, SPLITS)
    piece_begin = split * per_split
    piece_end = tl.minimum(piece_begin + per_split, num_pieces)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    member = head_chunk * BLOCK_H + offs_m % BLOCK_H
    position = base + query_chunk * QUERIES + offs_m // BLOCK_H
    mask_m = (offs_m < QUERIES * BLOCK_H) & (member < GROUP)
    mask_m = mask_m & (position >= low) & (position <= high)
    head = kv_head * GROUP + member
    token = (token_of_zero + position).to(tl.int64)
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
    if MODE != SINK_WINDOW:
        acc, row_max, row_sum = attend_pieces(
            acc,
            row_max,
            row_sum,
            q,
            position,
            dense_row,
            k_head,
            v_head,
            table,
            selected,
            piece_begin,
            middle,
            num_front,
            first_selected,
            num_selected,
            first_local,
            high,
            window,
            num_sink,
            qk_scale,
            stride_kp,
            stride_kt,
            stride_vp,
            stride_vt,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            SEL_BLOCK,
            PAGE_SIZE,
            HAS_SELECTION,
            SELECTED_LAST,
            False,
            SHARDED,
            NUM_STAGES,
        )
    if OVERLAP and SELECTED_LAST:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc, row_max, row_sum = attend_pieces(
        acc,
        row_max,
        row_sum,
        q,
        position,
        dense_row,
        k_head,
        v_head,
        table,
        selected,
        middle,
        piece_end,
        num_front,
        first_selected,
        num_selected,
        first_local,
        high,
        window,
        num_sink,
        qk_scale,
        stride_kp,
        stride_kt,
        stride_vp,
        stride_vt,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        SEL_BLOCK,
        PAGE_SIZE,
        HAS_SELECTION,
        SMALL or not SELECTED_LAST,
        MODE == SINK_WINDOW,
        SHARDED,
        NUM_STAGES if (SELECTED_LAST or MODE == SINK_WINDOW) else 1,
    )

    mask_out = mask_m[:, None] & mask_d[None, :]
    if SPLITS > 1:
        place = ((tile * NUM_KV_HEADS + kv_head) * CHUNKS + pid % CHUNKS).to(tl.int64)
        parts = part_ptr + place * SPLITS * BLOCK_M * BLOCK_D
        parts += offs_m[:, None] * BLOCK_D + offs_d[None, :]
        states = state_ptr + place * SPLITS * 2 * BLOCK_M + offs_m
        tl.store(states + (2 * split) * BLOCK_M, row_max, mask=mask_m)
        tl.store(states + (2 * split + 1) * BLOCK_M, row_sum, mask=mask_m)
        if piece_begin < piece_end:
            tl.store(parts + split * BLOCK_M * BLOCK_D, acc, mask=mask_out)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel")
        if ticket != SPLITS - 1:
            return
        tl.store(ticket_ptr + place, 0)
        row_max, row_sum, acc = add_splits(
            parts,
            states,
            mask_m,
            mask_out,
            tl.cdiv(num_pieces, tl.maximum(per_split, 1)),
            BLOCK_M,
            BLOCK_D,
            SPLITS,
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
        mask=mask_out,
    )

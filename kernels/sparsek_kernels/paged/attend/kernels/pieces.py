"""Pieces of a tile's list of blocks: which keys they are, and attention over them."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.sample import entry_of
from sparsek_kernels.paged.kernels.tiles import NO_KEY, page_of


@triton.jit
def add_weights(acc, row_max, row_sum, logits, scale):
    """Running softmax that makes room for keys of ``logits * scale`` (base 2), and their weights.

    What it returns is ``(acc, row_max, row_sum, weights)``; ``acc`` still lacks their values.
    """
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * scale)
    weights = tl.exp2(logits * scale - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    return acc, new_max, row_sum, weights


@triton.jit
def piece_start(
    piece,
    selected_ptr,
    num_front, first_selected, num_selected, first_local,
    SEL_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SELECTION: tl.constexpr,
):  # fmt: skip
    """First position of piece ``piece``, ``BLOCK_N`` keys of an entry of the tile's list, and the
    binary log of their weight.

    Selected blocks are entries ``[first_selected, first_selected + num_selected)``; the entries
    before and after them count up from zero, then from ``first_local`` (see ``tile_list``).
    """
    PARTS: tl.constexpr = SEL_BLOCK // BLOCK_N
    t = piece // PARTS
    later = tl.where(t >= first_selected, num_selected, 0)
    block = tl.where(t < num_front, t, first_local + t - num_front - later)
    if HAS_SELECTION:
        chosen = (t >= first_selected) & (t < first_selected + num_selected)
        index, log = entry_of(tl.load(selected_ptr + t - first_selected, mask=chosen, other=0))
        block = tl.where(chosen, index, block)
    else:
        log = 0.0
    return block * SEL_BLOCK + (piece % PARTS) * BLOCK_N, log


@triton.jit
def piece_keys(
    piece,
    selected_ptr,
    num_front, first_selected, num_selected, first_local,
    SEL_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SELECTION: tl.constexpr,
):  # fmt: skip
    """Positions of the keys of piece ``piece``, the next entries of a list of blocks so small that
    ``BLOCK_N`` keys hold several, and binary logs of their weights.  Two ``[BLOCK_N]``

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
        index, log = entry_of(tl.load(selected_ptr + t, mask=late & there, other=0))
        block = tl.where(late, index, block)
    else:
        log = tl.zeros([BLOCK_N], dtype=tl.float32)
    return tl.where(there, block * SEL_BLOCK + offs_n % SEL_BLOCK, NO_KEY), log


@triton.jit
def attend_pieces(
    acc, row_max, row_sum, q, position, dense_row,
    k_ptr, v_ptr, table_ptr, selected_ptr,
    piece_begin, piece_end, num_front, first_selected, num_selected, first_local, high, window,
    num_sink, qk_scale,
    stride_kp, stride_kt,
    stride_vp, stride_vt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SEL_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_SELECTION: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, SHARDED: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over pieces ``[piece_begin, piece_end)`` of the tile's list of blocks.

    The page of the next piece is looked up one iteration ahead, so that the loads of K and V wait
    for no other load.  ``MASKED`` compares positions (diagonal, window, end of the sequence).
    With ``SHARDED``, pages of other ranks (-1 in the block table) are masked and never read.
    An entry of the list that is none has a weight of 0.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    SMALL: tl.constexpr = SEL_BLOCK < BLOCK_N  # several blocks a piece; `start` is then every key's
    WHOLE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    # Pieces of a list's last block may lie past the sequence: the table need not have their pages.
    PAST: tl.constexpr = MASKED and not WINDOWED and SEL_BLOCK > BLOCK_N
    find: tl.constexpr = piece_keys if SMALL else piece_start
    last_piece = piece_end - 1
    start, log = find(
        piece_begin, selected_ptr,
        num_front, first_selected, num_selected, first_local,
        SEL_BLOCK, BLOCK_N, HAS_SELECTION,
    )  # fmt: skip
    some = piece_begin < piece_end
    if SMALL:
        page = page_of(table_ptr, start, some & (start <= high), PAGE_SIZE)
    elif WHOLE:
        page = page_of(table_ptr, start, some & (start <= high) if PAST else some, PAGE_SIZE)
    else:
        page = page_of(table_ptr, start + offs_n, some & (start + offs_n <= high), PAGE_SIZE)
    for piece in tl.range(piece_begin, piece_end, num_stages=NUM_STAGES):
        next_start, next_log = find(
            tl.minimum(piece + 1, last_piece), selected_ptr,
            num_front, first_selected, num_selected, first_local,
            SEL_BLOCK, BLOCK_N, HAS_SELECTION,
        )  # fmt: skip
        keys = start if SMALL else start + offs_n
        if SMALL:
            next_page = page_of(table_ptr, next_start, next_start <= high, PAGE_SIZE)
            rows = keys % PAGE_SIZE
        elif WHOLE:
            next_page = page_of(
                table_ptr, next_start, next_start <= high if PAST else True, PAGE_SIZE
            )
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
        if HAS_SELECTION:
            logits = logits * qk_scale + (log[None, :] if SMALL else log)
            acc, row_max, row_sum, weights = add_weights(acc, row_max, row_sum, logits, 1.0)
        else:
            acc, row_max, row_sum, weights = add_weights(acc, row_max, row_sum, logits, qk_scale)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        start, log = next_start, next_log
        page = next_page
    return acc, row_max, row_sum

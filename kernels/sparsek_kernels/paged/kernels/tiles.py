"""Which blocks one tile attends, as device arithmetic.

The numbers of ``policy.py`` (the rule) in the form the kernels need: a tile's positions, whether
it sees everything, and its ordered list of blocks: sinks, then selected, then local ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.sample import CANDIDATES as _CANDIDATES
from sparsek_kernels.paged.sample import MOST_LISTED as _MOST_LISTED

DENSE: tl.constexpr = tl.constexpr(0)
SINK_WINDOW: tl.constexpr = tl.constexpr(1)
TOP_K: tl.constexpr = tl.constexpr(2)

CANDIDATES = tl.constexpr(_CANDIDATES)
MOST_LISTED = tl.constexpr(_MOST_LISTED)
NO_KEY: tl.constexpr = tl.constexpr(1 << 30)  # a position past every query


@triton.jit
def tile_span(
    tile,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    FROM_TABLE: tl.constexpr, TILES_PER_REQUEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Positions of a tile: ``(request, base, low, high, token_of_zero)``.

    ``base`` is the position of the tile's row 0, ``[low, high]`` the query positions it holds
    (``high < low``: none) and ``token_of_zero + position`` the row of q of a position.

    With ``FROM_TABLE`` the tile is row ``tile`` of ``tiles_ptr`` (request or -1, aligned base);
    else it is ``TILE`` query tokens of request ``tile // TILES_PER_REQUEST``.
    """
    if FROM_TABLE:
        request = tl.load(tiles_ptr + 2 * tile)
        base = tl.load(tiles_ptr + 2 * tile + 1)
        known = request >= 0
        request = tl.maximum(request, 0)
    else:
        request = tile // TILES_PER_REQUEST
        base = 0
        known = True
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_token = tl.load(cu_seqlens_ptr + request).to(tl.int32)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1).to(tl.int32) - first_token
    start = seq_len - num_tokens
    if not FROM_TABLE:
        base = start + (tile % TILES_PER_REQUEST) * TILE
    low = tl.maximum(base, start)
    high = tl.minimum(base + TILE, seq_len) - 1
    high = tl.where(known, high, low - 1)
    return request, base, low, high, first_token - start


@triton.jit
def tile_sees_all(
    tile_start, dense_below,
    MODE: tl.constexpr, POLICY_TILE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr = 1,
):  # fmt: skip
    """``SelectionPolicy.sees_all`` of the policy tile that starts at ``tile_start``."""
    if MODE == DENSE:
        full = tile_start >= 0
    else:
        full = tile_start + POLICY_TILE <= dense_below
        if MODE == TOP_K:
            own = tile_start // (SEL_BLOCK * ALIGN) * ALIGN
            first_local = tl.maximum(own - REACH_BLOCKS, 0)
            candidates = first_local - tl.minimum(first_local, SINK_BLOCKS)
            full = full | (candidates <= SCORED_BLOCKS)
    return full


@triton.jit
def tile_places(
    tile_start, SEL_BLOCK: tl.constexpr, SCORED_BLOCKS: tl.constexpr, GROWTH: tl.constexpr
):
    """``SelectionPolicy.places`` of the policy tile that starts at ``tile_start``.

    ``SCORED_BLOCKS`` are of shallow tiles, ``GROWTH`` is of the policy.
    """
    if GROWTH is None:
        return SCORED_BLOCKS
    else:
        deep = tl.minimum(tile_start, GROWTH.end) - GROWTH.start
        return SCORED_BLOCKS + tl.maximum(deep, 0) // (GROWTH.every * SEL_BLOCK)


@triton.jit
def listed_places(places):
    """``SelectionPolicy.listed_places``."""
    return tl.maximum(tl.minimum(CANDIDATES * places, MOST_LISTED), places)


@triton.jit
def tile_list(
    tile_start, low, high, full, window, places,
    MODE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr, ALIGN: tl.constexpr = 1,
):  # fmt: skip
    """The ordered list of attended blocks as ``(num_front, num_selected, first_local, count)``.

    Entry ``t`` is block ``t`` below ``num_front``, the ``t - num_front``-th selected block for the
    next ``num_selected`` entries, and counts up from ``first_local`` after those.  ``places`` are
    of :func:`tile_places`, ``ALIGN`` is ``SelectionPolicy.segment_blocks``.
    """
    last = high // SEL_BLOCK
    if MODE == SINK_WINDOW:
        first_local = tl.maximum(low - window + 1, 0) // SEL_BLOCK
    else:
        own = tile_start // (SEL_BLOCK * ALIGN) * ALIGN
        first_local = tl.maximum(own - REACH_BLOCKS, 0)
    num_front = tl.minimum(first_local, SINK_BLOCKS)
    num_selected = places
    num_front = tl.where(full, last + 1, num_front)
    num_selected = tl.where(full, 0, num_selected)
    first_local = tl.where(full, last + 1, first_local)
    count = num_front + num_selected + last + 1 - first_local
    count = tl.where(high < low, 0, tl.where(high < 0, 0, count))
    return num_front, num_selected, first_local, count


@triton.jit
def page_of(table_ptr, positions, mask, PAGE_SIZE: tl.constexpr):
    """Physical pages (int64) that hold ``positions`` of the sequence with this table row."""
    return tl.load(table_ptr + positions // PAGE_SIZE, mask=mask, other=0).to(tl.int64)

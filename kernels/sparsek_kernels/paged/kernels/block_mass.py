"""Exact attention mass of blocks, for a few sampled queries of every prefill tile.

The rule is docs/selection.md.  A *sample* is one query position of a tile, a *row* one query head
of a sample, and a *strip* the consecutive tiles of a request whose rows fill ``ROWS``: they share
the keys that they are multiplied with.  Three kernels follow each other:

* ``sample_rows_kernel`` gathers the rows of every strip;
* ``block_mass_kernel`` writes, for each row and block, the base-2 logarithm of the sum of the
  exponentials of the row's scores against the keys of the block (here, or for Hopper in
  ``block_mass_sm90.py``);
* ``tile_scores_kernel`` divides by the rows' totals and adds up the rows of each tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.tiles import TOP_K, page_of, tile_sees_all, tile_span


@triton.jit
def strip_span(
    local,
    strip_of_tile_ptr,
    strips_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
):
    """``(request, base, low, high, token of zero)`` of the ``local``-th strip of a launch.

    The launch covers the strips of tiles ``first_tile .. first_tile + num_tiles - 1``.  A strip
    past them, or one whose tiles all see everything, has ``high < low``.
    """
    first = tl.load(strip_of_tile_ptr + first_tile)
    last = tl.load(strip_of_tile_ptr + first_tile + num_tiles - 1)
    strip = tl.minimum(first + local, last)
    TOKENS: tl.constexpr = ROWS // (SAMPLES * GROUP_PAD) * TILE
    request, base, low, high, token_of_zero = tile_span(
        strip, strips_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, TOKENS
    )
    full = tile_sees_all(
        tl.maximum(high, 0) // TILE * TILE,
        dense_below,
        TOP_K,
        TILE,
        SEL_BLOCK,
        SINK_BLOCKS,
        REACH_BLOCKS,
        SCORED_BLOCKS,
    )
    high = tl.where(full | (first + local > last), low - 1, high)
    return request, base, low, high, token_of_zero


@triton.jit
def sample_positions(
    row,
    base,
    low,
    high,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """Query position of each row of the strip at ``base``, -1 for rows that are none.

    A tile has a sample for every ``STRIDE`` positions: the last of them that is a query.
    """
    sample = row // GROUP_PAD
    tile_base = base + sample // SAMPLES * TILE
    first = tile_base + sample % SAMPLES * STRIDE
    position = tl.minimum(tl.minimum(first + STRIDE, tile_base + TILE) - 1, high)
    return tl.where((position >= low) & (position >= first), position, -1)


@triton.jit(do_not_specialize=["dense_below", "first_tile", "num_tiles"])
def sample_rows_kernel(
    rows_ptr,
    q_ptr,
    strip_of_tile_ptr,
    strips_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    stride_qt,
    stride_qh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
):
    """Copy ``BLOCK_M`` rows of one strip and KV head to ``rows [strips, Hkv, ROWS, D]``.

    Grid ``(strips, Hkv, ROWS // BLOCK_M)``.  Rows that are no query are zeros.
    """
    local = tl.program_id(0)
    kv_head = tl.program_id(1)
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    _request, base, low, high, token_of_zero = strip_span(
        local, strip_of_tile_ptr, strips_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below,
        first_tile, num_tiles, TILE, SAMPLES, GROUP_PAD, ROWS, SEL_BLOCK, SINK_BLOCKS,
        REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    if high < low:
        return
    position = sample_positions(offs_m, base, low, high, TILE, SAMPLES, STRIDE, GROUP_PAD)
    member = offs_m % GROUP_PAD
    live = (position >= 0) & (member < GROUP)
    token = (token_of_zero + position).to(tl.int64)
    source = q_ptr + token * stride_qt + (kv_head * GROUP + member) * stride_qh
    mask_d = (offs_d < HEAD_DIM)[None, :]
    q = tl.load(source[:, None] + offs_d[None, :], mask=live[:, None] & mask_d, other=0.0)
    place = (local.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + offs_m
    tl.store(rows_ptr + place[:, None] * HEAD_DIM + offs_d[None, :], q, mask=mask_d)


@triton.jit
def log_sums(s, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Base-2 logarithms of the sums of ``2 ** s`` over each block.  ``[BLOCK_M, BLOCKS]``.

    s: ``[BLOCK_M, BLOCKS * WIDTH]``; a block of ``-inf`` gives ``-inf``.
    """
    blocks = tl.reshape(s, [s.shape[0], BLOCKS, WIDTH])
    top = tl.max(blocks, axis=2)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top + tl.log2(tl.sum(tl.exp2(blocks - top[:, :, None]), axis=2))


@triton.jit
def log_add(x, y):
    """Base-2 logarithm of ``2 ** x + 2 ** y``; either may be ``-inf``."""
    top = tl.maximum(x, y)
    reference = tl.where(top == float("-inf"), 0.0, top)
    return reference + tl.log2(tl.exp2(x - reference) + tl.exp2(y - reference))


@triton.jit(do_not_specialize=["dense_below", "first_tile", "num_tiles"])
def block_mass_kernel(
    mass_ptr,
    rows_ptr,
    k_ptr,
    strip_of_tile_ptr,
    strips_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    width,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_br,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
    SPAN_BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Logarithmic masses of ``SPAN_BLOCKS`` blocks for ``BLOCK_M`` rows of one strip and KV head.

    Grid ``(strips * ROWS // BLOCK_M, Hkv, spans)``.  Writes ``mass [strips, Hkv, width, ROWS]``
    fp32, up to the block of each slice's last query.  A step takes ``BLOCK_N`` keys: several blocks
    at once, or a piece of one.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(SEL_BLOCK)
    WIDTH: tl.constexpr = PADDED if PADDED < BLOCK_N else BLOCK_N
    BLOCKS: tl.constexpr = BLOCK_N // WIDTH
    PIECES: tl.constexpr = (SEL_BLOCK + WIDTH - 1) // WIDTH
    SLICES: tl.constexpr = ROWS // BLOCK_M
    local = tl.program_id(0) // SLICES
    kv_head = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(2) * SPAN_BLOCKS
    request, base, low, high, _token_of_zero = strip_span(
        local, strip_of_tile_ptr, strips_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below,
        first_tile, num_tiles, TILE, SAMPLES, GROUP_PAD, ROWS, SEL_BLOCK, SINK_BLOCKS,
        REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    if high < low:
        return
    offs_m = tl.program_id(0) % SLICES * BLOCK_M + tl.arange(0, BLOCK_M)
    position = sample_positions(offs_m, base, low, high, TILE, SAMPLES, STRIDE, GROUP_PAD)
    last = tl.max(position)
    end = tl.minimum(last // SEL_BLOCK + 1, begin + SPAN_BLOCKS)
    if (last < 0) | (begin >= end):
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    place = (local.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + offs_m
    q = tl.load(
        rows_ptr + place[:, None] * HEAD_DIM + offs_d[None, :], mask=mask_d[None, :], other=0.0
    )  # [BLOCK_M, BLOCK_D]
    column = tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCKS)
    table = block_table_ptr + request.to(tl.int64) * stride_br
    head = (local.to(tl.int64) * NUM_KV_HEADS + kv_head) * width
    out = mass_ptr + head * ROWS + offs_m
    before = tl.full([BLOCK_M, BLOCKS], float("-inf"), tl.float32)
    for step in tl.range(begin * PIECES, end * PIECES, BLOCKS, num_stages=NUM_STAGES):
        first = step // PIECES
        piece = step % PIECES
        offset = piece * WIDTH + column % WIDTH
        key = (first + column // WIDTH) * SEL_BLOCK + offset
        inside = (first + column // WIDTH < end) & (offset < SEL_BLOCK) & (key <= last)
        page = page_of(table, key, inside, PAGE_SIZE)
        row = page * stride_kp + kv_head * stride_kh + key % PAGE_SIZE * stride_kt
        k = tl.load(
            k_ptr + row[None, :] + offs_d[:, None],
            mask=mask_d[:, None] & inside[None, :],
            other=0.0,
        ).to(q.dtype)  # [BLOCK_D, BLOCK_N]
        s = tl.dot(q, k, input_precision="ieee") * qk_scale
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        mass = log_sums(s, BLOCKS, WIDTH)
        if PIECES > 1:
            mass = log_add(mass, tl.where(piece > 0, before, float("-inf")))
            before = mass
        block = first + offs_b
        tl.store(
            out[:, None] + block.to(tl.int64)[None, :] * ROWS, mass, mask=(block < end)[None, :]
        )


@triton.jit(do_not_specialize=["dense_below", "first_tile"])
def tile_scores_kernel(
    scores_ptr,
    mass_ptr,
    tiles_ptr,
    strip_of_tile_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    width,
    stride_st,
    stride_sh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Scores of the blocks of one tile and KV head: the rows' shares of attention, added up.

    Grid ``(tiles, Hkv)``.  Writes ``scores [tiles, Hkv, blocks]`` fp32 for the blocks before the
    one of the tile's last query.
    """
    local = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    tile = first_tile + local
    _request, base, low, high, _token_of_zero = tile_span(
        tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, TILE
    )
    full = tile_sees_all(
        base, dense_below, TOP_K, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if (high < low) | full:
        return
    TILE_ROWS: tl.constexpr = SAMPLES * GROUP_PAD
    TILES: tl.constexpr = ROWS // TILE_ROWS
    BLOCK_R: tl.constexpr = triton.next_power_of_2(TILE_ROWS)
    offs_r = tl.arange(0, BLOCK_R)
    offs_b = tl.arange(0, BLOCK_B)
    position = sample_positions(offs_r, base, low, high, TILE, SAMPLES, STRIDE, GROUP_PAD)
    live = (position >= 0) & (offs_r < TILE_ROWS) & (offs_r % GROUP_PAD < GROUP)
    own = tl.where(live, position // SEL_BLOCK, -1)
    strip = tl.load(strip_of_tile_ptr + tile) - tl.load(strip_of_tile_ptr + first_tile)
    head = (strip.to(tl.int64) * NUM_KV_HEADS + kv_head) * width
    mass = mass_ptr + head * ROWS + base // TILE % TILES * TILE_ROWS + offs_r
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for first in range(0, tl.max(own) + 1, BLOCK_B):
        block = first + offs_b
        x = tl.load(
            mass[:, None] + block.to(tl.int64)[None, :] * ROWS,
            mask=block[None, :] <= own[:, None],
            other=float("-inf"),
        )  # [BLOCK_R, BLOCK_B]
        higher = tl.maximum(top, tl.max(x, axis=1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - reference)
        total += tl.sum(tl.exp2(x - reference[:, None]), axis=1)
        top = higher
    lse = tl.where(total > 0.0, top + tl.log2(total), float("inf"))
    scores = scores_ptr + local.to(tl.int64) * stride_st + kv_head * stride_sh
    num_blocks = high // SEL_BLOCK
    for first in range(0, num_blocks, BLOCK_B):
        block = first + offs_b
        x = tl.load(
            mass[:, None] + block.to(tl.int64)[None, :] * ROWS,
            mask=block[None, :] <= own[:, None],
            other=float("-inf"),
        )
        score = tl.sum(tl.exp2(x - lse[:, None]), axis=0)
        tl.store(scores + block, score, mask=block < num_blocks)

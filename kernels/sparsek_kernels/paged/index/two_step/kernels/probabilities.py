"""Ranking a tile's candidates by the attention that they really get.

The rule is docs/selection.md.  A *sample* is one query position of a tile, a *row* one query head
of a sample.  A tile's *list* is its sink blocks, the blocks that its windows touch and its
candidates, in *places* of this order.  Two kernels follow each other:

* ``listed_masses_kernel`` writes, for each row and *unit* of the list (a block, or an equal part of
  one), the base-2 logarithm of the sum of the exponentials of the row's scores against its keys;
* ``rank_blocks_kernel`` divides by the rows' totals, adds up the rows of each sample, and draws a
  sample of the candidates by the largest of these sums.  A candidate counts for as many blocks as
  it stands for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.sample import (
    CELL_BITS,
    SECOND_SPREAD,
    draw,
    entry_of,
    first_key_of,
    first_sum,
)
from sparsek_kernels.paged.kernels.tiles import (
    NO_KEY,
    TOP_K,
    listed_places,
    page_of,
    tile_places,
    tile_sees_all,
    tile_span,
)


@triton.jit
def sample_positions(
    row, base, low, high,
    TILE: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):  # fmt: skip
    """Query position of each row of the tile at ``base``, -1 for rows that are none.

    A tile has a sample for every ``STRIDE`` positions: the last of them that is a query.
    """
    sample = row // GROUP_PAD
    first = base + sample * STRIDE
    position = tl.minimum(tl.minimum(first + STRIDE, base + TILE) - 1, high)
    there = (sample < SAMPLES) & (row % GROUP_PAD < GROUP)
    return tl.where(there & (position >= low) & (position >= first), position, -1)


@triton.jit
def num_listed(
    base, width,
    SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr, GROWTH: tl.constexpr,
):  # fmt: skip
    """Candidates of the tile at ``base``, which are below ``width``, as ``top_blocks_kernel``
    lists them, and the tile's places."""
    competing = tl.minimum(base // SEL_BLOCK - REACH_BLOCKS, width) - SINK_BLOCKS
    places = tile_places(base, SEL_BLOCK, SCORED_BLOCKS, GROWTH)
    return tl.minimum(tl.maximum(competing, 0), listed_places(places)), places


@triton.jit
def unit_starts(
    units, end,
    candidates_ptr,
    first_local,
    FORCED_BLOCKS: tl.constexpr, SINK_BLOCKS: tl.constexpr, SEL_BLOCK: tl.constexpr,
    UNIT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """First positions of ``units`` of the list; those from ``end`` on are none.

    ``LISTED`` units belong to candidates, the others to sinks and local blocks.
    """
    PARTS: tl.constexpr = SEL_BLOCK // UNIT
    place = units // PARTS
    if LISTED:
        entry = tl.load(candidates_ptr + place - FORCED_BLOCKS, mask=units < end, other=0)
        block, _log = entry_of(entry)
    else:
        block = tl.where(place < SINK_BLOCKS, place, first_local + place - SINK_BLOCKS)
    return block * SEL_BLOCK + units % PARTS * UNIT


@triton.jit
def log_sums(s, UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Base-2 logarithms of the sums of ``2 ** s`` over each unit's keys.  ``[UNITS, BLOCK_M]``.

    s: ``[UNITS * UNIT, BLOCK_M]``; a unit of ``-inf`` gives ``-inf``.
    """
    units = tl.reshape(s, [UNITS, UNIT, s.shape[1]])
    top = tl.max(units, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top + tl.log2(tl.sum(tl.exp2(units - top[:, None, :]), axis=1))


@triton.jit
def log_add(x, y):
    """Base-2 logarithm of ``2 ** x + 2 ** y``; either may be ``-inf``."""
    top = tl.maximum(x, y)
    reference = tl.where(top == float("-inf"), 0.0, top)
    return reference + tl.log2(tl.exp2(x - reference) + tl.exp2(y - reference))


@triton.jit
def write_masses(
    masses, q, position, rows,
    k_ptr, table_ptr, candidates_ptr,
    begin, end, first_local, high, qk_scale,
    stride_kp, stride_kt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    FORCED_BLOCKS: tl.constexpr, LISTED: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Logarithmic masses of units ``[begin, end)`` of a tile's list, for the rows of ``q``.

    ``LISTED`` units lie before every query; of others, keys after a row's ``position`` are left
    out.  Products are ``K . Q^T``: a cell of 16 keys then lies in one warp, which adds it up alone.
    The pipeline fetches keys ``NUM_STAGES - 1`` iterations ahead, and as many again before each
    what leads to them: the page, and before it the entry of the list.
    """
    UNITS: tl.constexpr = BLOCK_N // UNIT
    DEPTH: tl.constexpr = (3 if LISTED else 2) * (NUM_STAGES - 1) + 1
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    for unit in tl.range(begin, end, UNITS, num_stages=DEPTH):
        units = unit + offs_n // UNIT
        starts = unit_starts(
            units, end, candidates_ptr, first_local, FORCED_BLOCKS, SINK_BLOCKS, SEL_BLOCK, UNIT,
            LISTED,
        )  # fmt: skip
        keys = tl.where(units < end, starts + offs_n % UNIT, NO_KEY)
        page = page_of(table_ptr, keys, keys <= high, PAGE_SIZE)
        k_row = page * stride_kp + keys % PAGE_SIZE * stride_kt
        k = tl.load(
            k_ptr + k_row[:, None] + offs_d[None, :],
            mask=(keys <= high)[:, None] & mask_d,
            other=0.0,
        )  # [BLOCK_N, BLOCK_D]
        s = tl.dot(k.to(q.dtype), tl.trans(q), input_precision="ieee") * qk_scale
        if not LISTED:
            s = tl.where(keys[:, None] <= position[None, :], s, float("-inf"))
        mine = unit + tl.arange(0, UNITS)
        tl.store(
            masses[None, :] + (mine * ROWS)[:, None],
            log_sums(s, UNITS, UNIT),  # [UNITS, BLOCK_M]
            mask=(mine < end)[:, None] & (rows < ROWS)[None, :],
        )


@triton.jit
def write_unit_masses(
    masses, q, position, rows,
    k_ptr, table_ptr, candidates_ptr,
    begin, end, first_local, high, qk_scale,
    stride_kp, stride_kt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SEL_BLOCK: tl.constexpr, SINK_BLOCKS: tl.constexpr,
    FORCED_BLOCKS: tl.constexpr, LISTED: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Write the masses of ``write_masses``, for many rows and units that lie in one page each.

    Products are ``Q . K^T``: a row's keys then lie in four threads, which add them up.  The places
    of 32 units are looked up at once and handed from lane to lane: a lookup in the inner loop would
    have its pipeline wait for every load.
    """
    LOOKED_UP: tl.constexpr = 32
    lane = tl.arange(0, LOOKED_UP)
    offs_n = tl.arange(0, UNIT)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    for first in tl.range(begin, end, LOOKED_UP, num_stages=1):
        starts = unit_starts(
            first + lane, end, candidates_ptr, first_local, FORCED_BLOCKS, SINK_BLOCKS, SEL_BLOCK,
            UNIT, LISTED,
        )  # fmt: skip
        known = (first + lane < end) & (starts <= high)
        pages = page_of(table_ptr, starts, known, PAGE_SIZE).to(tl.int32)
        for unit in tl.range(first, tl.minimum(first + LOOKED_UP, end), num_stages=NUM_STAGES):
            start = tl.sum(tl.where(lane == unit - first, starts, 0), axis=0)
            page = tl.sum(tl.where(lane == unit - first, pages, 0), axis=0).to(tl.int64)
            keys = start + offs_n
            k_row = page * stride_kp + (start % PAGE_SIZE + offs_n) * stride_kt
            pointers = k_ptr + k_row[:, None] + offs_d[None, :]
            if LISTED and HEAD_DIM == BLOCK_D:
                k = tl.load(pointers)
            elif LISTED:
                k = tl.load(pointers, mask=mask_d, other=0.0)
            else:
                k = tl.load(pointers, mask=(keys <= high)[:, None] & mask_d, other=0.0)
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [M, UNIT]
            if not LISTED:
                s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
            top = tl.max(s, axis=1) * qk_scale
            if not LISTED:
                top = tl.where(top == float("-inf"), 0.0, top)
            mass = top + tl.log2(tl.sum(tl.exp2(s * qk_scale - top[:, None]), axis=1))
            tl.store(masses + unit * ROWS, mass, mask=rows < ROWS)


@triton.jit(do_not_specialize=["dense_below", "first_tile", "width"])
def listed_masses_kernel(
    mass_ptr, q_ptr, k_ptr, candidates_ptr, tiles_ptr, block_table_ptr, seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale, dense_below, first_tile, width,
    stride_qt, stride_qh,
    stride_kp, stride_kh, stride_kt,
    stride_br,
    FROM_TABLE: tl.constexpr, TILES_PER_REQUEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    SAMPLES: tl.constexpr, STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr, GROWTH: tl.constexpr, LISTED_BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logarithmic masses of a share of one tile's list, for ``BLOCK_M`` rows of one KV head.

    Grid ``(tiles * row chunks, Hkv, shares)``.  Writes ``[tiles, Hkv, units, rows]`` fp32 for the
    units that the list has; nothing for tiles that see everything.  Each key is read once.
    Candidates are blocks below ``width``.
    """
    ROWS: tl.constexpr = SAMPLES * GROUP_PAD
    ROW_CHUNKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    PARTS: tl.constexpr = SEL_BLOCK // UNIT
    UNITS: tl.constexpr = BLOCK_N // UNIT
    FORCED_BLOCKS: tl.constexpr = SINK_BLOCKS + LOCAL_BLOCKS
    local = tl.program_id(0) // ROW_CHUNKS
    rows = tl.program_id(0) % ROW_CHUNKS * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_head = tl.program_id(1).to(tl.int64)
    request, base, low, high, token_of_zero = tile_span(
        first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, FROM_TABLE, TILES_PER_REQUEST,
        TILE,
    )  # fmt: skip
    position = sample_positions(rows, base, low, high, TILE, SAMPLES, STRIDE, GROUP, GROUP_PAD)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    token = (token_of_zero + position).to(tl.int64)
    q_row = token * stride_qt + (kv_head * GROUP + rows % GROUP_PAD) * stride_qh
    q = tl.load(
        q_ptr + q_row[:, None] + offs_d[None, :], mask=(position >= 0)[:, None] & mask_d, other=0.0
    )  # [BLOCK_M, BLOCK_D]
    full = tile_sees_all(
        base, dense_below, TOP_K, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if (high < low) | (high < 0) | full:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        return
    FORCED: tl.constexpr = FORCED_BLOCKS * PARTS
    FORCED_PIECES: tl.constexpr = (FORCED + UNITS - 1) // UNITS
    first_local = base // SEL_BLOCK - REACH_BLOCKS
    share = (FORCED_PIECES + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin = tl.program_id(2) * share
    end = begin + share
    place = (local.to(tl.int64) * NUM_KV_HEADS + kv_head) * (FORCED_BLOCKS + LISTED_BLOCKS)
    masses = mass_ptr + place * PARTS * ROWS + rows
    candidates = candidates_ptr + (local.to(tl.int64) * NUM_KV_HEADS + kv_head) * LISTED_BLOCKS
    table = block_table_ptr + request.to(tl.int64) * stride_br
    k_head = k_ptr + kv_head * stride_kh
    # Sinks and local blocks need no candidates: read them while the kernel that finds these runs.
    MANY: tl.constexpr = BLOCK_M >= 64
    WHOLE: tl.constexpr = (UNIT == BLOCK_N) and (PAGE_SIZE % UNIT == 0) and MANY
    forced_end = tl.minimum(end * UNITS, FORCED)
    if WHOLE:
        write_unit_masses(
            masses, q, position, rows, k_head, table, candidates, begin, forced_end, first_local,
            high, qk_scale, stride_kp, stride_kt, HEAD_DIM, BLOCK_D, UNIT, ROWS, PAGE_SIZE,
            SEL_BLOCK, SINK_BLOCKS, FORCED_BLOCKS, False, NUM_STAGES,
        )  # fmt: skip
    else:
        write_masses(
            masses, q, position, rows, k_head, table, candidates, begin * UNITS, forced_end,
            first_local, high, qk_scale, stride_kp, stride_kt, HEAD_DIM, BLOCK_D, BLOCK_N, UNIT,
            ROWS, PAGE_SIZE, SEL_BLOCK, SINK_BLOCKS, FORCED_BLOCKS, False, NUM_STAGES,
        )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    listed, _places = num_listed(
        base, width, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH
    )
    listed *= PARTS
    share = tl.cdiv(tl.cdiv(listed, UNITS), tl.num_programs(2)) * UNITS
    begin = FORCED + tl.program_id(2) * share
    end = tl.minimum(begin + share, FORCED + listed)
    if WHOLE:
        write_unit_masses(
            masses, q, position, rows, k_head, table, candidates, begin, end, first_local, high,
            qk_scale, stride_kp, stride_kt, HEAD_DIM, BLOCK_D, UNIT, ROWS, PAGE_SIZE, SEL_BLOCK,
            SINK_BLOCKS, FORCED_BLOCKS, True, NUM_STAGES,
        )  # fmt: skip
    else:
        write_masses(
            masses, q, position, rows, k_head, table, candidates, begin, end, first_local, high,
            qk_scale, stride_kp, stride_kt, HEAD_DIM, BLOCK_D, BLOCK_N, UNIT, ROWS, PAGE_SIZE,
            SEL_BLOCK, SINK_BLOCKS, FORCED_BLOCKS, True, NUM_STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["dense_below", "first_tile", "width"])
def rank_blocks_kernel(
    out_ptr, mass_ptr, candidates_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, width,
    stride_ot, stride_oh,
    FROM_TABLE: tl.constexpr, TILES_PER_REQUEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_R: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr, GROWTH: tl.constexpr, LISTED_BLOCKS: tl.constexpr,
    COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Selected blocks of one tile and KV head: a sample of candidates by what a sample of queries
    gives them at most.

    Grid ``(tiles, Hkv)``.  Writes ``[rows of tiles, Hkv, COUNT]`` int32 entries, blocks ascending;
    tiles that see everything get -1.  ``BLOCK_R`` rows are read at a time.
    """
    WIDTH: tl.constexpr = triton.next_power_of_2(COUNT)
    ROWS: tl.constexpr = SAMPLES * GROUP_PAD
    PARTS: tl.constexpr = SEL_BLOCK // UNIT
    FORCED_BLOCKS: tl.constexpr = SINK_BLOCKS + LOCAL_BLOCKS
    LIST_PLACES: tl.constexpr = FORCED_BLOCKS + LISTED_BLOCKS
    BLOCK: tl.constexpr = triton.next_power_of_2(LIST_PLACES)
    local = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    _request, base, low, high, _token_of_zero = tile_span(
        first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, FROM_TABLE, TILES_PER_REQUEST,
        TILE,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if high < low:
        return
    out = out_ptr + (first_tile + local).to(tl.int64) * stride_ot + kv_head * stride_oh
    full = tile_sees_all(
        base, dense_below, TOP_K, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if full | (high < 0):
        none = tl.arange(0, WIDTH)
        tl.store(out + none, tl.full([WIDTH], -1, tl.int32), mask=none < COUNT)
        return
    place = local.to(tl.int64) * NUM_KV_HEADS + kv_head
    candidates = candidates_ptr + place * LISTED_BLOCKS
    listed, places = num_listed(
        base, width, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH
    )
    if listed <= places:  # all of them, since rows of scores end before the window does
        each = tl.arange(0, WIDTH)
        all_of_them = tl.load(candidates + each, mask=each < listed, other=-1)
        tl.store(out + each, all_of_them, mask=each < COUNT)
        return
    list_end = FORCED_BLOCKS + listed
    offs = tl.arange(0, BLOCK)
    listed_here = (offs >= FORCED_BLOCKS) & (offs < list_end)
    entry = tl.load(candidates + offs - FORCED_BLOCKS, mask=listed_here, other=0)
    block, log = entry_of(entry)  # log of the weight: 0 of sinks and local blocks
    # Shares: of the rows read so far of one sample, of the sample that gives most.
    given = tl.zeros([BLOCK], dtype=tl.float32)
    score = tl.zeros([BLOCK], dtype=tl.float32)
    for first_row in tl.range(0, ROWS, BLOCK_R):
        row = first_row + tl.arange(0, BLOCK_R)
        position = sample_positions(row, base, low, high, TILE, SAMPLES, STRIDE, GROUP, GROUP_PAD)
        mask = (offs < list_end)[:, None] & (position >= 0)[None, :]
        masses = mass_ptr + place * LIST_PLACES * PARTS * ROWS + row[None, :]
        mass = tl.load(masses + (offs * PARTS * ROWS)[:, None], mask=mask, other=float("-inf"))
        for part in tl.static_range(1, PARTS):
            unit = offs * PARTS + part
            more = tl.load(masses + (unit * ROWS)[:, None], mask=mask, other=float("-inf"))
            mass = log_add(mass, more)  # [BLOCK, BLOCK_R]
        mass += log[:, None]
        top = tl.max(mass, axis=0)
        weight = tl.exp2(mass - tl.where(top == float("-inf"), 0.0, top)[None, :])
        total = tl.sum(weight, axis=0)
        shares = weight * tl.where(total > 0.0, 1.0 / total, 0.0)[None, :]
        if BLOCK_R > GROUP_PAD:  # whole samples
            grouped = tl.reshape(shares, [BLOCK, BLOCK_R // GROUP_PAD, GROUP_PAD])
            score = tl.maximum(score, tl.max(tl.sum(grouped, axis=2), axis=1))
        else:
            given = tl.where(first_row % GROUP_PAD == 0, 0.0, given) + tl.sum(shares, axis=1)
            score = tl.maximum(score, given)
    start = first_sum(base, SECOND_SPREAD)
    draw(
        out, score, block, listed_here & (entry >= 0), start, tl.maximum(entry, 0) >> CELL_BITS,
        first_key_of(places, SAMPLES * GROUP), places, COUNT,
    )  # fmt: skip

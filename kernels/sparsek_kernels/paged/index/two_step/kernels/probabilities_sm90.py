"""Masses of prefill tiles' lists for Hopper: four computing warpgroups, two loading warps (Gluon).

The rule and the maths: see ``rank.py``.  A program has two *streams*.  A stream is 128 rows of a
tile and KV head, and a share of the tile's list, whose units are blocks of 64 keys.  A warp looks
up the stream's blocks and copies two of them at a time to shared memory with TMA; two warpgroups
weigh them for 64 rows each.  While some warpgroups multiply, others take exponentials.

Products and exponentials take as long as each other.  In a chunk of 16,384 tokens with 32 query
and 8 KV heads, D = 128, lists of 202 blocks and 128 rows a tile make 3.4 G scores, 256 operations
each: 0.87 TFLOP, or 0.88 ms at the 989 TFLOP/s of an H200.  As many exponentials take 0.8 ms at 16
a clock and multiprocessor.  Programs read 6.8 GB of keys, nearly all of it from L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier, tma_load
from sparsek_kernels.paged.index.two_step.kernels.probabilities import num_listed, sample_positions
from sparsek_kernels.paged.kernels.pages_sm90 import NO_ROW
from sparsek_kernels.paged.kernels.sample import entry_of
from sparsek_kernels.paged.kernels.tiles import TOP_K, tile_sees_all, tile_span

ROWS: gl.constexpr = gl.constexpr(64)
BLOCK: gl.constexpr = gl.constexpr(64)
STREAMS: gl.constexpr = gl.constexpr(2)
LOOKED_UP: gl.constexpr = gl.constexpr(32)


@gluon.jit
def list_share(
    work,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, num_work, width,
    NUM_KV_HEADS: gl.constexpr, TILE: gl.constexpr, CHUNKS: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    LOCAL_BLOCKS: gl.constexpr, REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr,
    GROWTH: gl.constexpr,
):  # fmt: skip
    """A stream's work: ``(place, request, base, low, high, token_of_zero, first_local,
    forced place, forced, listed place, entries)``.

    ``place`` counts the lists.  The first ``forced`` of the share's entries are sinks and local
    blocks from ``forced place`` on, the others candidates from ``listed place`` on.
    """
    FORCED: gl.constexpr = SINK_BLOCKS + LOCAL_BLOCKS
    local = gl.minimum(work, num_work - 1) // CHUNKS
    request, base, low, high, token_of_zero = tile_span(
        first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, TILE
    )
    full = tile_sees_all(
        base, dense_below, TOP_K, TILE, BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    first_local = base // BLOCK - REACH_BLOCKS
    place = local.to(gl.int64) * NUM_KV_HEADS + gl.program_id(1)
    listed, _places = num_listed(
        base, width, BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH
    )
    shares = gl.num_programs(2)
    each = gl.cdiv(FORCED, shares)
    forced_place = gl.program_id(2) * each
    forced = gl.maximum(gl.minimum(each, FORCED - forced_place), 0)
    each = gl.cdiv(listed, shares)
    begin = gl.program_id(2) * each
    entries = forced + gl.maximum(gl.minimum(each, listed - begin), 0)
    entries = gl.where((work >= num_work) | (high < low) | (high < 0) | full, 0, entries)
    return (
        place, request, base, low, high, token_of_zero, first_local, forced_place, forced,
        FORCED + begin, entries,
    )  # fmt: skip


@gluon.jit
def entry_start(entry, forced_place, first_local, SINK_BLOCKS: gl.constexpr):
    """First position of an entry that is a sink or a local block."""
    place = forced_place + entry
    block = gl.where(place < SINK_BLOCKS, place, first_local + place - SINK_BLOCKS)
    return block * BLOCK


@gluon.jit
def entry_row(
    entry, candidates, table, forced_place, forced, listed_place, entries, first_local, high,
    page_rows, head_row,
    SINK_BLOCKS: gl.constexpr, LOCAL_BLOCKS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Rows of the cache where entries' keys begin; past all rows where there is no key."""
    listed = (entry >= forced) & (entry < entries)
    candidate = listed_place + entry - forced - (SINK_BLOCKS + LOCAL_BLOCKS)
    block, _log = entry_of(gl.load(candidates + candidate, mask=listed, other=0))
    start = entry_start(entry, forced_place, first_local, SINK_BLOCKS)
    start = gl.where(listed, block * BLOCK, start)
    there = (entry < entries) & (start <= high)
    page = gl.load(table + start // PAGE_SIZE, mask=there, other=-1).to(gl.int32)
    return gl.where(page < 0, NO_ROW, head_row + page * page_rows + start % PAGE_SIZE)


@gluon.jit
def load_partition(
    k_desc,
    k_smem, bars,
    block_table_ptr, candidates_ptr, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, num_work, width,
    stride_br,
    page_rows, head_rows, head_cols,
    NUM_KV_HEADS: gl.constexpr, TILE: gl.constexpr, CHUNKS: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    LOCAL_BLOCKS: gl.constexpr, REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr,
    GROWTH: gl.constexpr, LISTED_BLOCKS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Copy the blocks of one stream, two at a time, as buffers become free.

    A lane looks up a block each, 32 blocks before they are copied: no copy waits for a lookup.
    """
    full, empty = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    (
        place, request, _base, _low, high, _token_of_zero, first_local, forced_place,
        forced, listed_place, entries,
    ) = list_share(
        gl.program_id(0) * STREAMS + STREAM, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
        dense_below, first_tile, num_work, width, NUM_KV_HEADS, TILE, CHUNKS,
        SINK_BLOCKS, LOCAL_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH,
    )  # fmt: skip
    candidates = candidates_ptr + place * LISTED_BLOCKS
    table = block_table_ptr + request.to(gl.int64) * stride_br
    head_row = gl.program_id(1) * head_rows
    head_col = gl.program_id(1) * head_cols
    lane = gl.arange(0, LOOKED_UP, gl.BlockedLayout([1], [32], [1], [0]))
    ahead = entry_row(
        lane, candidates, table, forced_place, forced, listed_place, entries, first_local, high,
        page_rows, head_row, SINK_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE,
    )  # fmt: skip
    for first in range(0, entries, LOOKED_UP):
        rows = ahead
        ahead = entry_row(
            first + LOOKED_UP + lane, candidates, table, forced_place, forced, listed_place,
            entries, first_local, high, page_rows, head_row, SINK_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE,
        )  # fmt: skip
        for entry in range(first, gl.minimum(first + LOOKED_UP, entries), 2):
            row_0 = gl.sum(gl.where(lane == entry - first, rows, 0), axis=0)
            row_1 = gl.sum(gl.where(lane == entry - first + 1, rows, 0), axis=0)
            stage = entry // 2 % STAGES
            buffer = STREAM * STAGES + stage
            mbarrier.wait(empty.index(buffer), ((entry // (2 * STAGES)) & 1) ^ 1)
            mbarrier.expect(full.index(buffer), 2 * PARTS * k_desc.block_type.nbytes)
            for part in gl.static_range(PARTS):
                half = (buffer * PARTS + part) * 2
                column = head_col + part * 64
                tma_load(k_desc, [row_0, column], full.index(buffer), k_smem.index(half))
                tma_load(k_desc, [row_1, column], full.index(buffer), k_smem.index(half + 1))


@gluon.jit
def log2(x):
    """Base-2 logarithm in one instruction, within 2 ** -22; of 0 it is ``-inf``."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def write_pair(
    s, masses, pair, forced_place, forced, listed_place, entries, first_local, position, qk_scale,
    MASKED: gl.constexpr, SINK_BLOCKS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Logarithmic masses of a pair of blocks with scores ``s``, for 64 rows."""
    if MASKED:
        S_LAYOUT: gl.constexpr = s.type.layout
        column = gl.arange(0, 2 * BLOCK, layout=gl.SliceLayout(0, S_LAYOUT))
        entry = 2 * pair + column // BLOCK
        start = entry_start(entry, forced_place, first_local, SINK_BLOCKS)
        key = gl.where(entry < forced, start + column % BLOCK, 0)  # candidates lie before all rows
        s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
    blocks = gl.reshape(s, [ROWS, 2, BLOCK])
    top = gl.max(blocks, axis=2) * qk_scale
    if MASKED:
        top = gl.where(top == float("-inf"), 0.0, top)
    mass = top + log2(gl.sum(gl.exp2(blocks * qk_scale - gl.expand_dims(top, 2)), axis=2))
    LAYOUT: gl.constexpr = mass.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    entry = 2 * pair + gl.arange(0, 2, gl.SliceLayout(0, LAYOUT))
    place = entry + gl.where(entry < forced, forced_place, listed_place - forced)
    gl.store(masses + (place * WIDTH)[None, :] + row[:, None], mass, (entry < entries)[None, :])


@gluon.jit
def weigh_pairs(
    first, last, q_tile, k_wide, bars, masses, forced_place, forced, listed_place, entries,
    first_local, position, qk_scale,
    MASKED: gl.constexpr, SINK_BLOCKS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    STREAM: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pairs ``first .. last`` of blocks, as they arrive."""
    full, empty = bars
    zero = gl.zeros([ROWS, 2 * BLOCK], gl.float32, S_LAYOUT)
    for pair in range(first, last):
        buffer = STREAM * STAGES + pair % STAGES
        mbarrier.wait(full.index(buffer), (pair // STAGES) & 1)
        token = warpgroup_mma(
            q_tile, k_wide.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(empty.index(buffer), count=1)
        write_pair(
            s, masses, pair, forced_place, forced, listed_place, entries, first_local, position,
            qk_scale, MASKED, SINK_BLOCKS, WIDTH,
        )  # fmt: skip


@gluon.jit
def weigh_partition(
    mass_ptr, q_ptr,
    q_smem, k_wide, bars,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_tile, num_work, width, qk_scale,
    stride_qt, stride_qh,
    NUM_KV_HEADS: gl.constexpr, TILE: gl.constexpr, CHUNKS: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    LOCAL_BLOCKS: gl.constexpr, REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr,
    GROWTH: gl.constexpr, LISTED_BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr, SAMPLES: gl.constexpr, STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, STREAM: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of a stream, from their queries to their masses of each block."""
    WIDTH: gl.constexpr = SAMPLES * GROUP_PAD
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK, 16])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    (
        place, _request, base, low, high, token_of_zero, first_local, forced_place, forced,
        listed_place, entries,
    ) = list_share(
        gl.program_id(0) * STREAMS + STREAM, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
        dense_below, first_tile, num_work, width, NUM_KV_HEADS, TILE, CHUNKS,
        SINK_BLOCKS, LOCAL_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH,
    )  # fmt: skip
    if entries > 0:
        first_row = (gl.program_id(0) * STREAMS + STREAM) % CHUNKS * (2 * ROWS) + INDEX * ROWS
        masses = mass_ptr + place * (SINK_BLOCKS + LOCAL_BLOCKS + LISTED_BLOCKS) * WIDTH + first_row
        q_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, Q_LAYOUT))
        sampled = sample_positions(q_row, base, low, high, TILE, SAMPLES, STRIDE, GROUP, GROUP_PAD)
        head = gl.program_id(1) * GROUP + q_row % GROUP_PAD
        channel = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, Q_LAYOUT))
        offsets = (token_of_zero + sampled).to(gl.int64) * stride_qt
        offsets += head.to(gl.int64) * stride_qh
        there = (sampled >= 0)[:, None]
        q = gl.load(q_ptr + offsets[:, None] + channel[None, :], mask=there, other=0.0)
        q_tile = q_smem.index(2 * STREAM + INDEX)
        q_tile.store(q)
        fence_async_shared()
        thread_barrier()
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        position = sample_positions(row, base, low, high, TILE, SAMPLES, STRIDE, GROUP, GROUP_PAD)
        pairs = gl.cdiv(entries, 2)
        masked = gl.cdiv(forced, 2)
        weigh_pairs(
            0, masked, q_tile, k_wide, bars, masses, forced_place, forced, listed_place, entries,
            first_local, position, qk_scale, True, SINK_BLOCKS, WIDTH, STAGES, STREAM, S_LAYOUT,
        )  # fmt: skip
        weigh_pairs(
            masked, pairs, q_tile, k_wide, bars, masses, forced_place, forced, listed_place,
            entries, first_local, position, qk_scale, False, SINK_BLOCKS, WIDTH, STAGES, STREAM,
            S_LAYOUT,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["dense_below", "first_tile", "num_work", "width"])
def listed_masses_sm90_kernel(
    mass_ptr, q_ptr, k_desc, candidates_ptr, tiles_ptr, block_table_ptr, seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale, dense_below, first_tile, num_work, width,
    stride_qt, stride_qh,
    k_page_rows, k_head_rows, k_head_cols,
    stride_br,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SAMPLES: gl.constexpr, STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SINK_BLOCKS: gl.constexpr, LOCAL_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr, GROWTH: gl.constexpr,
    LISTED_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid ``(half of num_work, Hkv, shares)``; writes what ``listed_masses_kernel`` does.

    ``num_work`` is tiles times row chunks.  ``k_desc`` describes K as a matrix in boxes of 64 x 64;
    ``k_*`` are the distances between pages and heads in it.
    """
    dtype: gl.constexpr = k_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    CHUNKS: gl.constexpr = SAMPLES * GROUP_PAD // (2 * ROWS)
    BUFFERS: gl.constexpr = STREAMS * STAGES
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    K_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2 * STREAMS, ROWS, HEAD_DIM], Q_WIDE)
    k_smem = gl.allocate_shared_memory(dtype, [BUFFERS * PARTS * 2, BLOCK, 64], k_desc.layout)
    k_wide = reinterpret(k_smem, dtype, [BUFFERS, 2 * BLOCK, HEAD_DIM], K_WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], bar)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    bars = (full, empty)
    gl.warp_specialize(
        [
            (
                weigh_partition,
                (
                    mass_ptr, q_ptr, q_smem, k_wide, bars, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_work, width, qk_scale, stride_qt,
                    stride_qh, NUM_KV_HEADS, TILE, CHUNKS, SINK_BLOCKS, LOCAL_BLOCKS, REACH_BLOCKS,
                    SCORED_BLOCKS, GROWTH, LISTED_BLOCKS, GROUP, GROUP_PAD, SAMPLES, STRIDE,
                    HEAD_DIM, STAGES, 0, 0,
                ),
            ),
            (
                weigh_partition,
                (
                    mass_ptr, q_ptr, q_smem, k_wide, bars, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_work, width, qk_scale, stride_qt,
                    stride_qh, NUM_KV_HEADS, TILE, CHUNKS, SINK_BLOCKS, LOCAL_BLOCKS, REACH_BLOCKS,
                    SCORED_BLOCKS, GROWTH, LISTED_BLOCKS, GROUP, GROUP_PAD, SAMPLES, STRIDE,
                    HEAD_DIM, STAGES, 0, 1,
                ),
            ),
            (
                weigh_partition,
                (
                    mass_ptr, q_ptr, q_smem, k_wide, bars, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_work, width, qk_scale, stride_qt,
                    stride_qh, NUM_KV_HEADS, TILE, CHUNKS, SINK_BLOCKS, LOCAL_BLOCKS, REACH_BLOCKS,
                    SCORED_BLOCKS, GROWTH, LISTED_BLOCKS, GROUP, GROUP_PAD, SAMPLES, STRIDE,
                    HEAD_DIM, STAGES, 1, 0,
                ),
            ),
            (
                weigh_partition,
                (
                    mass_ptr, q_ptr, q_smem, k_wide, bars, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_work, width, qk_scale, stride_qt,
                    stride_qh, NUM_KV_HEADS, TILE, CHUNKS, SINK_BLOCKS, LOCAL_BLOCKS, REACH_BLOCKS,
                    SCORED_BLOCKS, GROWTH, LISTED_BLOCKS, GROUP, GROUP_PAD, SAMPLES, STRIDE,
                    HEAD_DIM, STAGES, 1, 1,
                ),
            ),
            (
                load_partition,
                (
                    k_desc, k_smem, bars, block_table_ptr, candidates_ptr, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_work, width, stride_br,
                    k_page_rows, k_head_rows, k_head_cols, NUM_KV_HEADS, TILE, CHUNKS, SINK_BLOCKS,
                    LOCAL_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH, LISTED_BLOCKS, PAGE_SIZE,
                    HEAD_DIM, STAGES, 0,
                ),
            ),
            (
                load_partition,
                (
                    k_desc, k_smem, bars, block_table_ptr, candidates_ptr, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_work, width, stride_br,
                    k_page_rows, k_head_rows, k_head_cols, NUM_KV_HEADS, TILE, CHUNKS, SINK_BLOCKS,
                    LOCAL_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH, LISTED_BLOCKS, PAGE_SIZE,
                    HEAD_DIM, STAGES, 1,
                ),
            ),
        ],
        [4, 4, 4, 1, 1],
        [112, 112, 112, 24, 24],
    )  # fmt: skip

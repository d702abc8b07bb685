"""Scores of prefill tiles for Hopper: one loading warp, four computing warpgroups (Gluon).

The rule, the means and the parts are defined in ``tile_scores.py``.  Blocks have 64 keys, and a
part is one query head of 64 queries.  A persistent program takes four query heads of a KV head at
a time, one for each warpgroup.  The loading warp streams the means of 32 blocks at a time through
shared memory with TMA.  A single pass suffices: a warpgroup parks ``2 ** (logit - running
maximum)`` in a scratch of its own, and weighs the parked rows once it knows their denominators,
while the tensor cores serve its next part.

Products bound the kernel.  In the last chunk of 16,384 tokens of 131,072, with 32 query heads and
D = 128, each of 0.52 M rows meets 7,680 cells on average, 256 operations each: 1.03 TFLOP, or
1.04 ms at the 989 TFLOP/s of an H200.  The other warpgroups' products overlap the rest: an
exponential for each row and block (1.0 G: 0.27 ms at 16 a clock and multiprocessor), four maxima
(0.27 ms at 64), and 4 bytes parked and read back (4 GB: up to 0.84 ms for what leaves L2).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.tiles_sm90 import tile_index
from sparsek_kernels.paged.kernels.tile_scores import scored_span

ROWS: gl.constexpr = gl.constexpr(64)
BLOCKS: gl.constexpr = gl.constexpr(32)
CELLS: gl.constexpr = gl.constexpr(4)
HEADS: gl.constexpr = gl.constexpr(4)
TOGETHER: gl.constexpr = gl.constexpr(4)
BOX: gl.constexpr = gl.constexpr(64)


@gluon.jit
def scored_part(
    turn,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    first_request,
    num_requests,
    num_work,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    SEL_BLOCK: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
):
    """The program's work in its ``turn``-th turn.

    ``(tile, KV head, first head of four, request, base, low, high, row of q of position 0,
    blocks)`` of 64 queries from ``base`` on.  Heads are neighbours, and tiles are taken from the
    last one on: long contexts come first, and tiles without work fall on neighbouring programs.
    """
    CHUNKS: gl.constexpr = TILE // ROWS
    FOURS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    work = tile_index(turn)
    kv_head = work % NUM_KV_HEADS
    part = work // NUM_KV_HEADS % (CHUNKS * FOURS)
    tile = gl.maximum(num_tiles - 1 - work // (NUM_KV_HEADS * CHUNKS * FOURS), 0)
    request, base, low, high, token_of_zero = scored_span(
        first_tile + tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_request,
        num_requests, TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
    )  # fmt: skip
    base += part // FOURS * ROWS
    low = gl.maximum(low, base)
    high = gl.minimum(high, base + ROWS - 1)
    num_blocks = gl.where((work >= num_work) | (high < low), 0, high // ROWS)
    return tile, kv_head, part % FOURS * HEADS, request, base, low, high, token_of_zero, num_blocks


@gluon.jit
def load_partition(
    q_desc,
    means_desc,
    q_smem,
    mean_smem,
    bars,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    first_request,
    num_requests,
    num_work,
    max_steps,
    q_head_cols,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    SEL_BLOCK: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Issue every TMA load of this program's work, as buffers become free."""
    q_full, q_empty, full, empty = bars
    PARTS: gl.constexpr = HEAD_DIM // BOX
    filled = 0
    done = 0
    for turn in range(gl.cdiv(num_work, gl.num_programs(0))):
        _tile, kv_head, first_head, request, base, _low, _high, token_of_zero, num_blocks = (
            scored_part(
                turn, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_tile, num_tiles,
                first_request, num_requests, num_work, NUM_KV_HEADS, GROUP, TILE, SEL_BLOCK,
                SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
            )
        )  # fmt: skip
        if num_blocks > 0:
            for i in gl.static_range(HEADS):
                head = kv_head * GROUP + gl.minimum(first_head + i, GROUP - 1)
                mbarrier.wait(q_empty.index(i), (done & 1) ^ 1)
                mbarrier.expect(q_full.index(i), PARTS * q_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        q_desc, [token_of_zero + base, head * q_head_cols + part * BOX],
                        q_full.index(i), q_smem.index(i * PARTS + part),
                    )  # fmt: skip
            done += 1
            row = (request * NUM_KV_HEADS + kv_head) * max_steps * (CELLS * BLOCKS)
            for _step in range(gl.cdiv(num_blocks, BLOCKS)):
                stage = filled % STAGES
                mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), PARTS * means_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        means_desc, [row, part * BOX], full.index(stage),
                        mean_smem.index(stage * PARTS + part),
                    )  # fmt: skip
                row += CELLS * BLOCKS
                filled += 1


@gluon.jit
def to_threads(weights, LAYOUT: gl.constexpr):
    """``[64, 32]`` as the tensor cores leave it to ``[128, 16]``, a row per thread.

    Row ``(w, l, c)`` holds rows ``(w, 0, l)`` and ``(w, 1, l)`` of the tile (4 x 2 x 8), each in
    the columns ``(k, c, j)`` (4 x 4 x 2).
    """
    split = gl.reshape(weights, [4, 2, 8, 4, 4, 2])
    rows = gl.reshape(gl.permute(split, (0, 2, 4, 1, 3, 5)), [128, 16])
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)


@gluon.jit
def weigh_parked(
    out,
    parked,
    maxima,
    lse,
    begin,
    end,
):
    """Sum ``weights * 2 ** (maximum - lse)`` over the 64 rows, for blocks ``[begin, end)``.

    ``begin`` is a multiple of ``TOGETHER`` steps of ``BLOCKS``.  A thread adds up eight rows of
    eight blocks before any are exchanged.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1, 8], [8, 4, 1], [1, 4, 1], [2, 1, 0])
    PLACE: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, PLACE))
    group = gl.arange(0, 4 * TOGETHER, gl.SliceLayout(0, PLACE))
    element = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    thread_row = (row // 16 * 8 + row % 8) * 64 + row // 8 % 2 * 8
    place = thread_row[:, None] + (group // 4 * (ROWS * BLOCKS) + group % 4 * 16)[None, :]
    offsets = gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(element, 0), 0)
    tops_at = row[:, None] + (group // 4 * ROWS)[None, :]
    lse = gl.convert_layout(lse, gl.SliceLayout(1, PLACE))
    sum_group = gl.arange(0, 4 * TOGETHER, gl.SliceLayout(1, SUMS))
    sum_element = gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    column = (sum_group // 4 * BLOCKS + sum_group % 4 * 2)[:, None]
    column += (sum_element // 2 * 8 + sum_element % 2)[None, :]
    for first in range(begin, end, TOGETHER * BLOCKS):
        step = first // BLOCKS
        inside = (first + group // 4 * BLOCKS < end)[None, :] & (row >= 0)[:, None]
        tops = gl.load(maxima + step * ROWS + tops_at, mask=inside, other=-1.0e30)
        held = gl.load(
            parked + step * (ROWS * BLOCKS) + offsets,
            mask=gl.expand_dims(inside, 2),
            other=0.0,
        )  # [ROWS, 4 * TOGETHER, 8]
        weight = gl.expand_dims(gl.exp2(tops - lse[:, None]), 2)
        total = gl.sum(held.to(gl.float32) * weight, axis=0)
        gl.store(out + first + column, total, mask=first + column < end)


@gluon.jit
def score_partition(
    parts_ptr,
    parked_ptr,
    parked_max_ptr,
    q_wide,
    mean_wide,
    bars,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    first_request,
    num_requests,
    num_work,
    max_steps,
    width,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    SEL_BLOCK: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    INDEX: gl.constexpr,
):
    """One warpgroup: one query head of four, from products to sums over the queries.

    Past the last head of the group it repeats that head.
    """
    q_full, q_empty, full, empty = bars
    CELL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CELLS * BLOCKS, 16])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCKS, 16])
    THREADS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offs_m = gl.arange(0, ROWS, ROW_LAYOUT)
    offs_b = gl.arange(0, BLOCKS, COLUMN_LAYOUT)
    slot = (gl.program_id(0) * HEADS + INDEX).to(gl.int64) * max_steps
    parked = parked_ptr + slot * (ROWS * BLOCKS)
    thread = gl.arange(0, 128, gl.SliceLayout(1, THREADS)) * 16
    own = thread[:, None] + gl.arange(0, 16, gl.SliceLayout(0, THREADS))[None, :]
    maxima = parked_max_ptr + slot * ROWS
    q_tile = q_wide.index(INDEX)
    taken = 0
    done = 0
    # what is parked, of the part before: its denominators, where its sums go, how many
    parked_lse = gl.full([ROWS], 1.0e30, gl.float32, ROW_LAYOUT)
    parked_out = parts_ptr
    parked_blocks = 0
    for turn in range(gl.cdiv(num_work, gl.num_programs(0))):
        tile, kv_head, first_head, _request, base, low, high, _token, num_blocks = scored_part(
            turn, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_tile, num_tiles,
            first_request, num_requests, num_work, NUM_KV_HEADS, GROUP, TILE, SEL_BLOCK,
            SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
        )  # fmt: skip
        if num_blocks > 0:
            live = (base + offs_m >= low) & (base + offs_m <= high)
            partial = (base < low) | (base + ROWS - 1 > high)
            steps = gl.cdiv(num_blocks, BLOCKS)
            row_max = gl.full([ROWS], -1.0e30, gl.float32, ROW_LAYOUT)
            row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
            mbarrier.wait(q_full.index(INDEX), done & 1)
            for step in range(steps):
                if step % TOGETHER == 0:  # before its places are taken
                    begin = step * BLOCKS
                    end = gl.minimum(parked_blocks, begin + TOGETHER * BLOCKS)
                    weigh_parked(parked_out, parked, maxima, parked_lse, begin, end)
                    gl.thread_barrier()
                stage = taken % STAGES
                mbarrier.wait(full.index(stage), (taken // STAGES) & 1)
                zero = gl.zeros([ROWS, CELLS * BLOCKS], gl.float32, CELL_LAYOUT)
                token = warpgroup_mma(
                    q_tile, mean_wide.index(stage).permute((1, 0)), zero, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                cells = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(empty.index(stage), count=1)
                taken += 1
                logits = gl.max(gl.reshape(cells, [ROWS, CELLS, BLOCKS]), axis=1)
                logits = gl.convert_layout(logits, LAYOUT)
                if partial | ((step + 1) * BLOCKS > num_blocks):
                    seen = live[:, None] & (step * BLOCKS + offs_b < num_blocks)[None, :]
                    logits = gl.where(seen, logits, float("-inf"))
                new_max = gl.maximum(row_max, gl.max(logits, axis=1) * qk_scale)
                weights = gl.exp2(logits * qk_scale - new_max[:, None])
                row_sum = row_sum * gl.exp2(row_max - new_max) + gl.sum(weights, axis=1)
                row_max = new_max
                rows = to_threads(weights.to(parked_ptr.dtype.element_ty), THREADS)
                gl.store(parked + step * (ROWS * BLOCKS) + own, rows)
                gl.store(maxima + step * ROWS + offs_m, row_max)
            mbarrier.arrive(q_empty.index(INDEX), count=1)
            done += 1
            begin = gl.cdiv(steps, TOGETHER) * TOGETHER * BLOCKS
            weigh_parked(parked_out, parked, maxima, parked_lse, begin, parked_blocks)
            # base-2 log of the denominator; rows without a query get probability zero
            log_sum = row_max + gl.log2(row_sum)
            parked_lse = gl.where(live & (row_sum > 0.0), log_sum, 1.0e30)
            head = gl.minimum(first_head + INDEX, GROUP - 1)
            row = (tile * NUM_KV_HEADS + kv_head) * (TILE // ROWS) + base % TILE // ROWS
            parked_out = parts_ptr + (row * GROUP + head).to(gl.int64) * width
            parked_blocks = num_blocks
            gl.thread_barrier()
    weigh_parked(parked_out, parked, maxima, parked_lse, 0, parked_blocks)


@gluon.jit(
    do_not_specialize=[
        "dense_below",
        "first_tile",
        "num_tiles",
        "first_request",
        "num_requests",
        "num_work",
        "max_steps",
        "width",
    ]
)
def tile_scores_sm90_kernel(
    parts_ptr,
    parked_ptr,
    parked_max_ptr,
    q_desc,
    means_desc,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    first_request,
    num_requests,
    num_work,
    max_steps,
    width,
    q_head_cols,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    SEL_BLOCK: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: one program per multiprocessor; ``num_work`` KV heads, fours of heads and 64 queries.

    Writes ``parts [tiles, Hkv, TILE // 64, GROUP, width]``: sums over 64 queries of one head.
    ``parked``: ``[programs, 4, max_steps, 128, 16]`` fp16, values in ``[0, 1]`` in the order in
    which threads hold them; ``parked_max``: ``[programs, 4, max_steps, 64]`` fp32, the maxima that
    they refer to.  ``means_desc`` describes ``[requests * Hkv * max_steps * 128, D]``.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // BOX
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CELLS * BLOCKS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [HEADS * PARTS, ROWS, BOX], q_desc.layout)
    mean_smem = gl.allocate_shared_memory(
        dtype, [STAGES * PARTS, CELLS * BLOCKS, BOX], means_desc.layout
    )
    q_wide = q_smem._reinterpret(dtype, [HEADS, ROWS, HEAD_DIM], WIDE)
    mean_wide = mean_smem._reinterpret(dtype, [STAGES, CELLS * BLOCKS, HEAD_DIM], WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [HEADS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [HEADS, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(HEADS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HEADS)
    bars = (q_full, q_empty, full, empty)
    gl.warp_specialize(
        [
            (
                score_partition,
                (
                    parts_ptr, parked_ptr, parked_max_ptr, q_wide, mean_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    first_request, num_requests, num_work, max_steps, width, NUM_KV_HEADS, GROUP,
                    TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, STAGES, 0,
                ),
            ),
            (
                score_partition,
                (
                    parts_ptr, parked_ptr, parked_max_ptr, q_wide, mean_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    first_request, num_requests, num_work, max_steps, width, NUM_KV_HEADS, GROUP,
                    TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, STAGES, 1,
                ),
            ),
            (
                score_partition,
                (
                    parts_ptr, parked_ptr, parked_max_ptr, q_wide, mean_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    first_request, num_requests, num_work, max_steps, width, NUM_KV_HEADS, GROUP,
                    TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, STAGES, 2,
                ),
            ),
            (
                score_partition,
                (
                    parts_ptr, parked_ptr, parked_max_ptr, q_wide, mean_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    first_request, num_requests, num_work, max_steps, width, NUM_KV_HEADS, GROUP,
                    TILE, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, STAGES, 3,
                ),
            ),
            (
                load_partition,
                (
                    q_desc, means_desc, q_smem, mean_smem, bars, tiles_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, dense_below, first_tile, num_tiles, first_request, num_requests,
                    num_work, max_steps, q_head_cols, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE,
                    SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, STAGES,
                ),
            ),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip

"""Scores of prefill tiles for Hopper: one loading warp, four computing warpgroups (Gluon).

The rule, the means and the parts are defined in ``tile_scores.py``.  Blocks have 64 keys, and a
part is four query heads of the 16 samples of a tile.  A persistent program takes four neighbouring
tiles at a time, one for each warpgroup, with the same four heads.  The loading warp streams the
means of 32 blocks at a time through shared memory with TMA, as far as the longest of the tiles
needs them.  Tiles of more than one request do not share a stream: their program takes four streams,
one after the other.  A single pass over the means suffices: a warpgroup keeps
``2 ** (logit - running maximum)`` in a scratch of its own, and weighs the kept rows once it knows
their denominators, while the tensor cores serve its next part.

Products bound the kernel.  In the last chunk of 16,384 tokens of 131,072, with 32 query heads and
D = 128, each of 0.13 M sampled rows meets 7,680 cells on average, 256 operations each: 0.26 TFLOP,
or 0.26 ms at the 989 TFLOP/s of an H200.  The other warpgroups' products overlap the rest: an
exponential for each row and block (0.25 G: 0.07 ms at 16 a clock and multiprocessor), four maxima
(0.07 ms at 64), and 4 bytes kept and read back (1 GB: up to 0.21 ms for what leaves L2).  With
eight KV heads, programs read 1.0 GB of means, nearly all of it from L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier, tma_load
from sparsek_kernels.common.kernels.tiles_sm90 import tile_index

ROWS: gl.constexpr = gl.constexpr(64)
BLOCKS: gl.constexpr = gl.constexpr(32)
CELLS: gl.constexpr = gl.constexpr(4)
TILES: gl.constexpr = gl.constexpr(4)
STEPS_AT_ONCE: gl.constexpr = gl.constexpr(4)
BOX: gl.constexpr = gl.constexpr(64)


@gluon.jit
def tile_plan(tile, plan_ptr):
    """``(request, most, fewest)``: blocks that the samples of a tile see; 0 below tile 0."""
    there = tile >= 0
    request = gl.load(plan_ptr + 3 * tile, mask=there, other=0)
    most = gl.load(plan_ptr + 3 * tile + 1, mask=there, other=0)
    return request, most, gl.load(plan_ptr + 3 * tile + 2, mask=there, other=0)


@gluon.jit
def scored_item(turn, plan_ptr, num_tiles, HEAD_PARTS: gl.constexpr):
    """The program's work in its ``turn``-th turn: ``(last tile, heads, streams, request, blocks)``.

    Tiles ``last - 3`` to ``last``, and one of ``HEAD_PARTS`` fours of query heads.  One stream has
    the means of ``blocks`` blocks of the request; of four, each is one tile's.  Without work there
    are no streams.  Heads are neighbours, and tiles are taken from the last one on: long contexts
    come first, and tiles without work fall on neighbouring programs.
    """
    work = tile_index(turn)
    last = num_tiles - 1 - work // HEAD_PARTS * TILES
    request, blocks, _fewest = tile_plan(last, plan_ptr)
    together = True
    for i in gl.static_range(1, TILES):
        other, more, _fewest = tile_plan(last - i, plan_ptr)
        together = together & ((more == 0) | (blocks == 0) | (other == request))
        request = gl.where(more > 0, other, request)
        blocks = gl.maximum(blocks, more)
    streams = gl.where(blocks > 0, gl.where(together, 1, TILES), 0)
    return last, work % HEAD_PARTS, streams, request, blocks


@gluon.jit
def stream_of(stream, streams, last, request, blocks, plan_ptr):
    """``(request, blocks)`` whose means the ``stream``-th stream of an item has."""
    its_request, its_blocks, _fewest = tile_plan(last - stream, plan_ptr)
    return gl.where(streams == 1, request, its_request), gl.where(streams == 1, blocks, its_blocks)


@gluon.jit
def load_partition(
    q_desc, means_desc,
    q_smem, mean_smem, bars,
    plan_ptr,
    num_tiles, num_work, max_steps,
    NUM_KV_HEADS: gl.constexpr, FOURS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's work, as buffers become free."""
    q_full, q_empty, full, empty = bars
    PARTS: gl.constexpr = HEAD_DIM // BOX
    HEAD_PARTS: gl.constexpr = NUM_KV_HEADS * FOURS
    filled = 0
    done = 0
    for turn in range(gl.cdiv(num_work, gl.num_programs(0))):
        last, heads, streams, request, blocks = scored_item(turn, plan_ptr, num_tiles, HEAD_PARTS)
        if streams > 0:
            for i in gl.static_range(TILES):
                row = ((last - i) * HEAD_PARTS + heads) * ROWS
                mbarrier.wait(q_empty.index(i), (done & 1) ^ 1)
                mbarrier.expect(q_full.index(i), PARTS * q_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    tma_load(
                        q_desc, [row, part * BOX], q_full.index(i), q_smem.index(i * PARTS + part)
                    )
            done += 1
        for stream in range(streams):
            of, count = stream_of(stream, streams, last, request, blocks, plan_ptr)
            row = (of * NUM_KV_HEADS + heads // FOURS) * max_steps * (CELLS * BLOCKS)
            for _step in range(gl.cdiv(count, BLOCKS)):
                stage = filled % STAGES
                mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), PARTS * means_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    tma_load(
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
def weigh_kept(out, kept, maxima, lse, begin, end):
    """Sum ``weights * 2 ** (maximum - lse)`` over the 64 rows, for blocks ``[begin, end)``.

    ``begin`` is a multiple of ``STEPS_AT_ONCE`` steps of ``BLOCKS``.  A thread adds up eight rows
    of eight blocks before any are exchanged.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1, 8], [8, 4, 1], [1, 4, 1], [2, 1, 0])
    PLACE: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, PLACE))
    group = gl.arange(0, 4 * STEPS_AT_ONCE, gl.SliceLayout(0, PLACE))
    element = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    thread_row = (row // 16 * 8 + row % 8) * 64 + row // 8 % 2 * 8
    place = thread_row[:, None] + (group // 4 * (ROWS * BLOCKS) + group % 4 * 16)[None, :]
    offsets = gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(element, 0), 0)
    tops_at = row[:, None] + (group // 4 * ROWS)[None, :]
    lse = gl.convert_layout(lse, gl.SliceLayout(1, PLACE))
    sum_group = gl.arange(0, 4 * STEPS_AT_ONCE, gl.SliceLayout(1, SUMS))
    sum_element = gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    column = (sum_group // 4 * BLOCKS + sum_group % 4 * 2)[:, None]
    column += (sum_element // 2 * 8 + sum_element % 2)[None, :]
    for first in range(begin, end, STEPS_AT_ONCE * BLOCKS):
        step = first // BLOCKS
        inside = (first + group // 4 * BLOCKS < end)[None, :] & (row >= 0)[:, None]
        tops = gl.load(maxima + step * ROWS + tops_at, mask=inside, other=-1.0e30)
        held = gl.load(
            kept + step * (ROWS * BLOCKS) + offsets, mask=gl.expand_dims(inside, 2), other=0.0
        )  # [ROWS, 4 * STEPS_AT_ONCE, 8]
        weight = gl.expand_dims(gl.exp2(tops - lse[:, None]), 2)
        total = gl.sum(held.to(gl.float32) * weight, axis=0)
        gl.store(out + first + column, total, mask=first + column < end)


@gluon.jit
def score_partition(
    parts_ptr, kept_ptr, kept_max_ptr, seen_ptr,
    q_wide, mean_wide, bars,
    plan_ptr,
    qk_scale, num_tiles, num_work, max_steps, width,
    NUM_KV_HEADS: gl.constexpr, FOURS: gl.constexpr, STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: one tile of four, from products to sums over its samples and four heads.

    Of a stream that is not for its tile it only hands back the buffers.
    """
    q_full, q_empty, full, empty = bars
    HEAD_PARTS: gl.constexpr = NUM_KV_HEADS * FOURS
    CELL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CELLS * BLOCKS, 16])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCKS, 16])
    THREADS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offs_m = gl.arange(0, ROWS, ROW_LAYOUT)
    offs_b = gl.arange(0, BLOCKS, COLUMN_LAYOUT)
    first_kept = (gl.program_id(0) * TILES + INDEX).to(gl.int64) * max_steps
    kept = kept_ptr + first_kept * (ROWS * BLOCKS)
    thread = gl.arange(0, 128, gl.SliceLayout(1, THREADS)) * 16
    own = thread[:, None] + gl.arange(0, 16, gl.SliceLayout(0, THREADS))[None, :]
    maxima = kept_max_ptr + first_kept * ROWS
    q_tile = q_wide.index(INDEX)
    taken = 0
    done = 0
    # what is kept, of the part before: its denominators, where its sums go, how many
    kept_lse = gl.full([ROWS], 1.0e30, gl.float32, ROW_LAYOUT)
    kept_out = parts_ptr
    kept_blocks = 0
    for turn in range(gl.cdiv(num_work, gl.num_programs(0))):
        last, heads, streams, request, blocks = scored_item(turn, plan_ptr, num_tiles, HEAD_PARTS)
        _request, num_blocks, fewest = tile_plan(last - INDEX, plan_ptr)
        if streams > 0:
            mbarrier.wait(q_full.index(INDEX), done & 1)
        for stream in range(streams):
            _request, count = stream_of(stream, streams, last, request, blocks, plan_ptr)
            steps = gl.cdiv(count, BLOCKS)
            if (num_blocks > 0) & ((streams == 1) | (stream == INDEX)):
                place = ((last - INDEX) * HEAD_PARTS + heads).to(gl.int64)
                seen = gl.load(seen_ptr + place * ROWS + offs_m)
                row_max = gl.full([ROWS], -1.0e30, gl.float32, ROW_LAYOUT)
                row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
                for step in range(steps):
                    if step % STEPS_AT_ONCE == 0:  # before its places are taken
                        begin = step * BLOCKS
                        end = gl.minimum(kept_blocks, begin + STEPS_AT_ONCE * BLOCKS)
                        weigh_kept(kept_out, kept, maxima, kept_lse, begin, end)
                        thread_barrier()
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
                    if (step + 1) * BLOCKS > fewest:
                        valid = (step * BLOCKS + offs_b)[None, :] < seen[:, None]
                        logits = gl.where(valid, logits, float("-inf"))
                    new_max = gl.maximum(row_max, gl.max(logits, axis=1) * qk_scale)
                    weights = gl.exp2(logits * qk_scale - new_max[:, None])
                    row_sum = row_sum * gl.exp2(row_max - new_max) + gl.sum(weights, axis=1)
                    row_max = new_max
                    rows = to_threads(weights.to(kept_ptr.dtype.element_ty), THREADS)
                    gl.store(kept + step * (ROWS * BLOCKS) + own, rows)
                    gl.store(maxima + step * ROWS + offs_m, row_max)
                begin = gl.cdiv(steps, STEPS_AT_ONCE) * STEPS_AT_ONCE * BLOCKS
                weigh_kept(kept_out, kept, maxima, kept_lse, begin, kept_blocks)
                # base-2 log of the denominator; rows that are none get probability zero
                log_sum = row_max + gl.log2(row_sum)
                kept_lse = gl.where((seen > 0) & (row_sum > 0.0), log_sum, 1.0e30)
                kept_out = parts_ptr + place * width
                kept_blocks = num_blocks
                thread_barrier()
            else:
                for _step in range(steps):
                    stage = taken % STAGES
                    mbarrier.wait(full.index(stage), (taken // STAGES) & 1)
                    thread_barrier()  # no warp may still wait when the buffer is filled anew
                    mbarrier.arrive(empty.index(stage), count=1)
                    taken += 1
        if streams > 0:
            mbarrier.arrive(q_empty.index(INDEX), count=1)
            done += 1
    weigh_kept(kept_out, kept, maxima, kept_lse, 0, kept_blocks)


@gluon.jit(do_not_specialize=["num_tiles", "num_work", "max_steps", "width"])
def tile_scores_sm90_kernel(
    parts_ptr, kept_ptr, kept_max_ptr, seen_ptr, q_desc, means_desc, plan_ptr,
    qk_scale, num_tiles, num_work, max_steps, width,
    NUM_KV_HEADS: gl.constexpr, FOURS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor; ``num_work`` fours of tiles, KV heads, fours of heads.

    ``q_desc`` describes the rows, ``seen`` and ``plan`` the tiles that ``gather_samples_kernel``
    writes.  Writes ``parts [tiles, Hkv, FOURS, width]``: sums over 16 samples of four heads.
    ``kept``: ``[programs, 4, max_steps, 128, 16]`` fp16, values in ``[0, 1]`` in the order in
    which threads hold them; ``kept_max``: ``[programs, 4, max_steps, 64]`` fp32, the maxima that
    they refer to.  ``means_desc`` describes ``[requests * Hkv * max_steps * 128, D]``.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // BOX
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CELLS * BLOCKS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [TILES * PARTS, ROWS, BOX], q_desc.layout)
    mean_smem = gl.allocate_shared_memory(
        dtype, [STAGES * PARTS, CELLS * BLOCKS, BOX], means_desc.layout
    )
    q_wide = reinterpret(q_smem, dtype, [TILES, ROWS, HEAD_DIM], WIDE)
    mean_wide = reinterpret(mean_smem, dtype, [STAGES, CELLS * BLOCKS, HEAD_DIM], WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(TILES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=TILES)
    bars = (q_full, q_empty, full, empty)
    gl.warp_specialize(
        [
            (
                score_partition,
                (
                    parts_ptr, kept_ptr, kept_max_ptr, seen_ptr, q_wide, mean_wide, bars,
                    plan_ptr, qk_scale, num_tiles, num_work, max_steps, width, NUM_KV_HEADS, FOURS,
                    STAGES, 0,
                ),
            ),
            (
                score_partition,
                (
                    parts_ptr, kept_ptr, kept_max_ptr, seen_ptr, q_wide, mean_wide, bars,
                    plan_ptr, qk_scale, num_tiles, num_work, max_steps, width, NUM_KV_HEADS, FOURS,
                    STAGES, 1,
                ),
            ),
            (
                score_partition,
                (
                    parts_ptr, kept_ptr, kept_max_ptr, seen_ptr, q_wide, mean_wide, bars,
                    plan_ptr, qk_scale, num_tiles, num_work, max_steps, width, NUM_KV_HEADS, FOURS,
                    STAGES, 2,
                ),
            ),
            (
                score_partition,
                (
                    parts_ptr, kept_ptr, kept_max_ptr, seen_ptr, q_wide, mean_wide, bars,
                    plan_ptr, qk_scale, num_tiles, num_work, max_steps, width, NUM_KV_HEADS, FOURS,
                    STAGES, 3,
                ),
            ),
            (
                load_partition,
                (
                    q_desc, means_desc, q_smem, mean_smem, bars, plan_ptr, num_tiles, num_work,
                    max_steps, NUM_KV_HEADS, FOURS, HEAD_DIM, STAGES,
                ),
            ),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip

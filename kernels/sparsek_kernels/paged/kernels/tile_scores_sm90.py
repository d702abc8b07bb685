"""Scores of prefill tiles for Hopper: four loading warps, four computing warpgroups (Gluon).

The rule is that of :mod:`kernels_tile_scores`, and so is the single pass with parked weights.  A
persistent program takes tiles of 64 queries and a KV head; each warpgroup owns the 64 rows of one
query head.  The loading warps gather the cells of 32 blocks at a time.  While one warpgroup takes
maxima and exponentials, or weighs what it parked for the tile before, the tensor cores serve the
others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.paged.kernels.tiles import TOP_K, tile_sees_all, tile_span

ROWS: gl.constexpr = gl.constexpr(64)
BLOCKS: gl.constexpr = gl.constexpr(32)
CELLS: gl.constexpr = gl.constexpr(4)
HEADS: gl.constexpr = gl.constexpr(4)
TOGETHER: gl.constexpr = gl.constexpr(4)
BOX_BYTES: gl.constexpr = gl.constexpr(64 * 64 * 2)


@gluon.jit
def scored_tile(
    work,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
):
    """``(local tile, KV head, request, base, low, high, token of zero, blocks to score)``."""
    local = work % num_tiles
    request, base, low, high, token_of_zero = tile_span(
        first_tile + local, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, ROWS
    )
    full = tile_sees_all(
        base, dense_below, TOP_K, ROWS, ROWS, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    num_blocks = gl.where((high < low) | full, 0, high // ROWS)
    return local, work // num_tiles, request, base, low, high, token_of_zero, num_blocks


@gluon.jit
def load_partition(
    q_desc,
    q_smem,
    cell_smem,
    bars,
    summary_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    num_work,
    q_head_cols,
    stride_sp,
    stride_sh,
    stride_sc,
    stride_br,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the buffers: queries by TMA, cells by asynchronous copies of 16 bytes.

    Buffers hold 64 columns of the same cell of 32 blocks, so that the columns of the product are
    ordered by cell, then block: a maximum over the cells of a block stays within a thread.
    """
    q_full, q_empty, full, empty = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offs_b = gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    filled = 0
    turns = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        _local, kv_head, request, base, _low, _high, token_of_zero, num_blocks = scored_tile(
            work, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_tile, num_tiles,
            SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
        )  # fmt: skip
        if num_blocks > 0:
            table = block_table_ptr + request.to(gl.int64) * stride_br
            summary = summary_ptr + kv_head.to(gl.int64) * stride_sh
            for chunk in range(GROUP // HEADS):
                for i in gl.static_range(HEADS):
                    head = kv_head * GROUP + chunk * HEADS + i
                    mbarrier.wait(q_empty.index(i), (turns & 1) ^ 1)
                    mbarrier.expect(q_full.index(i), PARTS * BOX_BYTES)
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            q_desc, [token_of_zero + base, head * q_head_cols + part * 64],
                            q_full.index(i), q_smem.index(i * PARTS + part),
                        )  # fmt: skip
                page = gl.load(
                    table + offs_b * ROWS // PAGE_SIZE, mask=offs_b < num_blocks, other=0
                )
                for b in range(0, num_blocks, BLOCKS):
                    block = b + offs_b
                    cell = block * ROWS % PAGE_SIZE // 16
                    row = summary + page.to(gl.int64) * stride_sp + cell * stride_sc
                    block += BLOCKS
                    page = gl.load(
                        table + block * ROWS // PAGE_SIZE, mask=block < num_blocks, other=0
                    )
                    stage = filled % STAGES
                    mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
                    for part in gl.static_range(PARTS):
                        for c in gl.static_range(CELLS):
                            pointers = row[:, None] + (c * stride_sc + part * 64) + offs_d[None, :]
                            async_copy.async_copy_global_to_shared(
                                cell_smem.index((stage * PARTS + part) * CELLS + c), pointers
                            )
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    filled += 1
                turns += 1


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
    scores,
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
        gl.store(scores + first + column, total, mask=first + column < end)


@gluon.jit
def score_partition(
    scores_ptr,
    parked_ptr,
    parked_max_ptr,
    q_wide,
    cell_wide,
    bars,
    tiles_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    num_work,
    max_steps,
    stride_ot,
    stride_oh,
    stride_op,
    GROUP: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    INDEX: gl.constexpr,
):
    """One warpgroup: the rows of one query head of four, from products to sums over the queries."""
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
    turns = 0
    # what is parked, of the tile before: its denominators, where its scores go, how many
    parked_lse = gl.full([ROWS], 1.0e30, gl.float32, ROW_LAYOUT)
    parked_scores = scores_ptr
    parked_blocks = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        local, kv_head, _request, base, low, high, _token, num_blocks = scored_tile(
            work, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_tile, num_tiles,
            SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
        )  # fmt: skip
        if num_blocks > 0:
            live = (base + offs_m >= low) & (base + offs_m <= high)
            partial = (base < low) | (base + ROWS - 1 > high)
            steps = gl.cdiv(num_blocks, BLOCKS)
            for chunk in range(GROUP // HEADS):
                row_max = gl.full([ROWS], -1.0e30, gl.float32, ROW_LAYOUT)
                row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
                mbarrier.wait(q_full.index(INDEX), turns & 1)
                for step in range(steps):
                    if step % TOGETHER == 0:  # before its places are taken
                        begin = step * BLOCKS
                        end = gl.minimum(parked_blocks, begin + TOGETHER * BLOCKS)
                        weigh_parked(parked_scores, parked, maxima, parked_lse, begin, end)
                        gl.thread_barrier()
                    stage = taken % STAGES
                    mbarrier.wait(full.index(stage), (taken // STAGES) & 1)
                    fence_async_shared()
                    zero = gl.zeros([ROWS, CELLS * BLOCKS], gl.float32, CELL_LAYOUT)
                    token = warpgroup_mma(
                        q_tile, cell_wide.index(stage).permute((1, 0)), zero, use_acc=False,
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
                turns += 1
                begin = gl.cdiv(steps, TOGETHER) * TOGETHER * BLOCKS
                weigh_parked(parked_scores, parked, maxima, parked_lse, begin, parked_blocks)
                # base-2 log of the denominator; rows without a query get probability zero
                log_sum = row_max + gl.log2(row_sum)
                parked_lse = gl.where(live & (row_sum > 0.0), log_sum, 1.0e30)
                parked_scores = scores_ptr + local.to(gl.int64) * stride_ot
                parked_scores += kv_head.to(gl.int64) * stride_oh
                parked_scores += (chunk * HEADS + INDEX) * stride_op
                parked_blocks = num_blocks
                gl.thread_barrier()
    weigh_parked(parked_scores, parked, maxima, parked_lse, 0, parked_blocks)


@gluon.jit(do_not_specialize=["dense_below", "first_tile", "num_tiles", "num_work", "max_steps"])
def tile_scores_hopper_kernel(
    scores_ptr,
    parked_ptr,
    parked_max_ptr,
    q_desc,
    summary_ptr,
    tiles_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    num_work,
    max_steps,
    q_head_cols,
    stride_sp,
    stride_sh,
    stride_sc,
    stride_br,
    stride_ot,
    stride_oh,
    stride_op,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: one program per multiprocessor; ``num_work`` pairs of tile and KV head.

    Writes ``scores_ptr`` ``[tiles, Hkv, GROUP, blocks]``: sums over a tile's queries, by head.
    ``parked_ptr``: ``[programs, 4, max_steps, 128, 16]`` fp16, values in ``[0, 1]`` in the order in
    which threads hold them; ``parked_max_ptr``: ``[programs, 4, max_steps, 64]`` fp32, the maxima
    that they refer to.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    BUFFER: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCKS, 64], dtype)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CELLS * BLOCKS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [HEADS * PARTS, ROWS, 64], q_desc.layout)
    cell_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS * CELLS, BLOCKS, 64], BUFFER)
    q_wide = q_smem._reinterpret(dtype, [HEADS, ROWS, HEAD_DIM], WIDE)
    cell_wide = cell_smem._reinterpret(dtype, [STAGES, CELLS * BLOCKS, HEAD_DIM], WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [HEADS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [HEADS, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(HEADS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # every loading thread arrives
        mbarrier.init(empty.index(i), count=HEADS)
    bars = (q_full, q_empty, full, empty)
    gl.warp_specialize(
        [
            (
                score_partition,
                (
                    scores_ptr, parked_ptr, parked_max_ptr, q_wide, cell_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    num_work, max_steps, stride_ot, stride_oh, stride_op, GROUP, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, STAGES, 0,
                ),
            ),
            (
                score_partition,
                (
                    scores_ptr, parked_ptr, parked_max_ptr, q_wide, cell_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    num_work, max_steps, stride_ot, stride_oh, stride_op, GROUP, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, STAGES, 1,
                ),
            ),
            (
                score_partition,
                (
                    scores_ptr, parked_ptr, parked_max_ptr, q_wide, cell_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    num_work, max_steps, stride_ot, stride_oh, stride_op, GROUP, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, STAGES, 2,
                ),
            ),
            (
                score_partition,
                (
                    scores_ptr, parked_ptr, parked_max_ptr, q_wide, cell_wide, bars, tiles_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles,
                    num_work, max_steps, stride_ot, stride_oh, stride_op, GROUP, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, STAGES, 3,
                ),
            ),
            (
                load_partition,
                (
                    q_desc, q_smem, cell_smem, bars, summary_ptr, tiles_ptr, block_table_ptr,
                    seq_lens_ptr, cu_seqlens_ptr, dense_below, first_tile, num_tiles, num_work,
                    q_head_cols, stride_sp, stride_sh, stride_sc, stride_br, GROUP, HEAD_DIM,
                    PAGE_SIZE, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, STAGES,
                ),
            ),
        ],
        [4, 4, 4, 4],
        [112, 112, 112, 32],
    )  # fmt: skip

"""Exact attention mass of blocks for Hopper: one loading warp, four computing warpgroups (Gluon).

The rule, the strips and the layouts are those of ``block_mass.py``; blocks have 64 keys and strips
256 rows.  A persistent program takes one strip, KV head and span of keys at a time.  The loading
warp streams two blocks of K at a time through shared memory with TMA; each warpgroup owns 64 rows.
While one takes exponentials, the tensor cores serve the others.
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

from sparsek_kernels.paged.kernels.block_mass import sample_positions, strip_span

SLICE: gl.constexpr = gl.constexpr(64)
SLICES: gl.constexpr = gl.constexpr(4)
ROWS: gl.constexpr = gl.constexpr(256)
BLOCK: gl.constexpr = gl.constexpr(64)
PAIR: gl.constexpr = gl.constexpr(128)
BOX_BYTES: gl.constexpr = gl.constexpr(64 * 64 * 2)


@gluon.jit
def work_span(
    work,
    strip_of_tile_ptr,
    strips_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    num_strips,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    TILE: gl.constexpr,
    SAMPLES: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    SPAN: gl.constexpr,
):
    """``(strip, KV head, request, base, low, high, first key, last key)`` of a piece of work.

    Strips are neighbours, then heads, then spans: what runs together shares keys in L2.  The last
    key is below the first one where there is nothing to do.
    """
    local = work % num_strips
    kv_head = work // num_strips % NUM_KV_HEADS
    begin = work // num_strips // NUM_KV_HEADS * SPAN
    request, base, low, high, _token = strip_span(
        local, strip_of_tile_ptr, strips_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below,
        first_tile, num_tiles, TILE, SAMPLES, GROUP_PAD, ROWS, BLOCK, SINK_BLOCKS, REACH_BLOCKS,
        SCORED_BLOCKS,
    )  # fmt: skip
    end = gl.where(high < low, -1, gl.minimum(high, begin + SPAN - 1))
    return local, kv_head, request, base, low, high, begin, end


@gluon.jit
def load_partition(
    rows_desc,
    k_desc,
    q_smem,
    k_smem,
    bars,
    block_table_ptr,
    strip_of_tile_ptr,
    strips_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    first_tile,
    num_tiles,
    num_strips,
    num_work,
    k_page_rows,
    k_head_rows,
    k_head_cols,
    stride_br,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    SAMPLES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Issue every TMA load of this program's work, as buffers become free."""
    q_full, q_empty, k_full, k_empty = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    filled = 0
    done = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        local, kv_head, request, _base, _low, high, begin, end = work_span(
            work, strip_of_tile_ptr, strips_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below,
            first_tile, num_tiles, num_strips, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, SINK_BLOCKS,
            REACH_BLOCKS, SCORED_BLOCKS, SPAN,
        )  # fmt: skip
        if end >= begin:
            table = block_table_ptr + request.to(gl.int64) * stride_br
            row = (local * NUM_KV_HEADS + kv_head) * ROWS
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, SLICES * PARTS * BOX_BYTES)
            for i in gl.static_range(SLICES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        rows_desc, [row + i * SLICE, part * 64], q_full,
                        q_smem.index(i * PARTS + part),
                    )  # fmt: skip
            done += 1
            head_row = kv_head * k_head_rows
            column = kv_head * k_head_cols
            # looked up a pair ahead, so that no copy waits for a load; past the end, the last page
            page_0 = gl.load(table + begin // PAGE_SIZE)
            page_1 = gl.load(table + gl.minimum(begin + BLOCK, high) // PAGE_SIZE)
            for key in range(begin, end + 1, PAIR):
                next_0 = gl.load(table + gl.minimum(key + PAIR, high) // PAGE_SIZE)
                next_1 = gl.load(table + gl.minimum(key + PAIR + BLOCK, high) // PAGE_SIZE)
                stage = filled % STAGES
                mbarrier.wait(k_empty.index(stage), ((filled // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), 2 * PARTS * BOX_BYTES)
                top = page_0 * k_page_rows + head_row + key % PAGE_SIZE
                bottom = page_1 * k_page_rows + head_row + (key + BLOCK) % PAGE_SIZE
                for part in gl.static_range(PARTS):
                    buffer = (stage * PARTS + part) * 2
                    tma.async_copy_global_to_shared(
                        k_desc, [top, column + part * 64], k_full.index(stage), k_smem.index(buffer)
                    )
                    tma.async_copy_global_to_shared(
                        k_desc, [bottom, column + part * 64], k_full.index(stage),
                        k_smem.index(buffer + 1),
                    )  # fmt: skip
                page_0, page_1 = next_0, next_1
                filled += 1


@gluon.jit
def halves(s, LAYOUT: gl.constexpr):
    """The two blocks of scores ``[64, 128]`` as ``[64, 64]`` each; no data moves."""
    first, second = gl.split(gl.permute(gl.reshape(s, [SLICE, 2, BLOCK]), (0, 2, 1)))
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def log_sum(s, qk_scale, MASKED: gl.constexpr):
    """Base-2 logarithm of the sum of ``2 ** (s * qk_scale)`` over the keys of a block: ``[64]``."""
    top = gl.max(s, 1) * qk_scale
    if MASKED:
        top = gl.where(top == float("-inf"), 0.0, top)
    return top + gl.log2(gl.sum(gl.exp2(s * qk_scale - top[:, None]), 1))


@gluon.jit
def mass_pairs(
    out,
    taken,
    begin,
    end,
    last_key,
    position,
    q_tile,
    k_wide,
    k_full,
    k_empty,
    qk_scale,
    MASKED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Masses of the pairs of blocks from key ``begin`` up to ``end``; returns the pairs taken."""
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIR, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, HALF))
    for key in range(begin, end, PAIR):
        stage = taken % STAGES
        mbarrier.wait(k_full.index(stage), (taken // STAGES) & 1)
        zero = gl.zeros([SLICE, PAIR], gl.float32, WIDE)
        token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        taken += 1
        first, second = halves(s, HALF)
        place = out + (key // BLOCK).to(gl.int64) * ROWS
        if MASKED:
            first = gl.where((key + column)[None, :] <= position[:, None], first, float("-inf"))
            later = (key + BLOCK + column)[None, :]
            second = gl.where(later <= position[:, None], second, float("-inf"))
            gl.store(place, log_sum(first, qk_scale, True))
            known = (position > -2) & (key + BLOCK <= last_key)
            gl.store(place + ROWS, log_sum(second, qk_scale, True), mask=known)
        else:
            gl.store(place, log_sum(first, qk_scale, False))
            gl.store(place + ROWS, log_sum(second, qk_scale, False))
    return taken


@gluon.jit
def mass_partition(
    mass_ptr,
    q_wide,
    k_wide,
    bars,
    strip_of_tile_ptr,
    strips_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    num_strips,
    num_work,
    width,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    TILE: gl.constexpr,
    SAMPLES: gl.constexpr,
    STRIDE: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
    INDEX: gl.constexpr,
):
    """One warpgroup: 64 rows of each strip, from products to logarithmic masses."""
    q_full, q_empty, k_full, k_empty = bars
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    row = INDEX * SLICE + gl.arange(0, SLICE, gl.SliceLayout(1, HALF))
    q_tile = q_wide.index(INDEX)
    taken = 0
    done = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        local, kv_head, _request, base, low, high, begin, end = work_span(
            work, strip_of_tile_ptr, strips_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below,
            first_tile, num_tiles, num_strips, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, SINK_BLOCKS,
            REACH_BLOCKS, SCORED_BLOCKS, SPAN,
        )  # fmt: skip
        if end >= begin:
            position = sample_positions(row, base, low, high, TILE, SAMPLES, STRIDE, GROUP_PAD)
            out = mass_ptr + (local * NUM_KV_HEADS + kv_head).to(gl.int64) * width * ROWS + row
            # keys before the strip's first query are seen by every row
            seen = gl.minimum(gl.maximum(low // PAIR * PAIR, begin), end + 1)
            mbarrier.wait(q_full, done & 1)
            if gl.max(position, 0) >= 0:
                taken = mass_pairs(
                    out, taken, begin, seen, end, position, q_tile, k_wide, k_full, k_empty,
                    qk_scale, False, STAGES,
                )  # fmt: skip
                taken = mass_pairs(
                    out, taken, seen, end + 1, end, position, q_tile, k_wide, k_full, k_empty,
                    qk_scale, True, STAGES,
                )  # fmt: skip
            else:  # no query among these rows: the buffers are passed on
                for _key in range(begin, end + 1, PAIR):
                    mbarrier.wait(k_full.index(taken % STAGES), (taken // STAGES) & 1)
                    mbarrier.arrive(k_empty.index(taken % STAGES), count=1)
                    taken += 1
            mbarrier.arrive(q_empty, count=1)
            done += 1


@gluon.jit(
    do_not_specialize=["dense_below", "first_tile", "num_tiles", "num_strips", "num_work", "width"]
)
def block_mass_sm90_kernel(
    mass_ptr,
    rows_desc,
    k_desc,
    strip_of_tile_ptr,
    strips_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    first_tile,
    num_tiles,
    num_strips,
    num_work,
    width,
    k_page_rows,
    k_head_rows,
    k_head_cols,
    stride_br,
    NUM_KV_HEADS: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    SAMPLES: gl.constexpr,
    STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: one program per multiprocessor; ``num_work`` strips, KV heads and spans of keys.

    Writes ``mass [strips, Hkv, width, 256]`` as ``block_mass_kernel`` does.  ``rows_desc`` and
    ``k_desc`` describe the sampled rows and K as matrices in boxes of 64 x 64.
    """
    dtype: gl.constexpr = k_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAIR, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [SLICES * PARTS, SLICE, 64], rows_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS * 2, BLOCK, 64], k_desc.layout)
    q_wide = q_smem._reinterpret(dtype, [SLICES, SLICE, HEAD_DIM], WIDE)
    k_wide = k_smem._reinterpret(dtype, [STAGES, PAIR, HEAD_DIM], WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=SLICES)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=SLICES)
    bars = (q_full, q_empty, k_full, k_empty)
    gl.warp_specialize(
        [
            (
                mass_partition,
                (
                    mass_ptr, q_wide, k_wide, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 0,
                ),
            ),
            (
                mass_partition,
                (
                    mass_ptr, q_wide, k_wide, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 1,
                ),
            ),
            (
                mass_partition,
                (
                    mass_ptr, q_wide, k_wide, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 2,
                ),
            ),
            (
                mass_partition,
                (
                    mass_ptr, q_wide, k_wide, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 3,
                ),
            ),
            (
                load_partition,
                (
                    rows_desc, k_desc, q_smem, k_smem, bars, block_table_ptr, strip_of_tile_ptr,
                    strips_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, first_tile, num_tiles,
                    num_strips, num_work, k_page_rows, k_head_rows, k_head_cols, stride_br,
                    NUM_KV_HEADS, GROUP_PAD, HEAD_DIM, TILE, SAMPLES, PAGE_SIZE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES,
                ),
            ),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip

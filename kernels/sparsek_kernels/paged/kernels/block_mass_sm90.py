"""Exact attention mass of blocks for Hopper: one loading warp, four computing warpgroups (Gluon).

The scores, strips and memory layouts are defined in ``block_mass.py``.  Blocks have 64 keys, strips
256 rows.  A persistent program takes one strip, KV head and span of keys at a time.  The loading
warp streams blocks of K through shared memory with TMA; each warpgroup owns 64 rows.
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
FOUR: gl.constexpr = gl.constexpr(256)
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
            # looked up a block ahead, so that no copy waits for a load
            page = gl.load(table + begin // PAGE_SIZE)
            for key in range(begin, end + 1, BLOCK):
                next_page = gl.load(table + gl.minimum(key + BLOCK, high) // PAGE_SIZE)
                stage = filled % STAGES
                mbarrier.wait(k_empty.index(stage), ((filled // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), PARTS * BOX_BYTES)
                k_row = page * k_page_rows + head_row + key % PAGE_SIZE
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        k_desc, [k_row, column + part * 64], k_full.index(stage),
                        k_smem.index(stage * PARTS + part),
                    )  # fmt: skip
                page = next_page
                filled += 1


@gluon.jit
def start_product(taken, q_tile, k_tiles, k_full, LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """Start the scores ``[64, 64]`` of the ``taken``-th block of K, once it has arrived."""
    stage = taken % STAGES
    mbarrier.wait(k_full.index(stage), (taken // STAGES) & 1)
    zero = gl.zeros([SLICE, BLOCK], gl.float32, LAYOUT)
    return warpgroup_mma(
        q_tile, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def log_sum(s, qk_scale, MASKED: gl.constexpr):
    """Base-2 logarithm of the sum of ``2 ** (s * qk_scale)`` over the keys of a block: ``[64]``."""
    top = gl.max(s, 1) * qk_scale
    if MASKED:
        top = gl.where(top == float("-inf"), 0.0, top)
    return top + gl.log2(gl.sum(gl.exp2(s * qk_scale - top[:, None]), 1))


@gluon.jit
def seen_masses(
    out,
    taken,
    begin,
    end,
    q_tile,
    k_tiles,
    k_full,
    k_empty,
    qk_scale,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Masses of the keys ``[begin, end)``, four blocks at a time; every row sees them all.

    The product of a block runs while the exponentials of the block before are taken.
    """
    for key in range(begin, end, FOUR):
        place = out + (key // BLOCK).to(gl.int64) * ROWS
        s_0 = start_product(taken, q_tile, k_tiles, k_full, LAYOUT, STAGES)
        s_1 = start_product(taken + 1, q_tile, k_tiles, k_full, LAYOUT, STAGES)
        s_0 = warpgroup_mma_wait(1, deps=[s_0])
        mbarrier.arrive(k_empty.index(taken % STAGES), count=1)
        gl.store(place, log_sum(s_0, qk_scale, False))
        s_2 = start_product(taken + 2, q_tile, k_tiles, k_full, LAYOUT, STAGES)
        s_1 = warpgroup_mma_wait(1, deps=[s_1])
        mbarrier.arrive(k_empty.index((taken + 1) % STAGES), count=1)
        gl.store(place + ROWS, log_sum(s_1, qk_scale, False))
        s_3 = start_product(taken + 3, q_tile, k_tiles, k_full, LAYOUT, STAGES)
        s_2 = warpgroup_mma_wait(1, deps=[s_2])
        mbarrier.arrive(k_empty.index((taken + 2) % STAGES), count=1)
        gl.store(place + 2 * ROWS, log_sum(s_2, qk_scale, False))
        s_3 = warpgroup_mma_wait(0, deps=[s_3])
        mbarrier.arrive(k_empty.index((taken + 3) % STAGES), count=1)
        gl.store(place + 3 * ROWS, log_sum(s_3, qk_scale, False))
        taken += 4
    return taken


@gluon.jit
def masked_masses(
    out,
    taken,
    begin,
    end,
    position,
    q_tile,
    k_tiles,
    k_full,
    k_empty,
    qk_scale,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Masses of the blocks from key ``begin`` to ``end``, later keys hidden; the blocks taken."""
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    for key in range(begin, end, BLOCK):
        token = start_product(taken, q_tile, k_tiles, k_full, LAYOUT, STAGES)
        s = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(k_empty.index(taken % STAGES), count=1)
        taken += 1
        s = gl.where((key + column)[None, :] <= position[:, None], s, float("-inf"))
        gl.store(out + (key // BLOCK).to(gl.int64) * ROWS, log_sum(s, qk_scale, True))
    return taken


@gluon.jit
def mass_partition(
    mass_ptr,
    q_tiles,
    k_tiles,
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
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    row = INDEX * SLICE + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
    q_tile = q_tiles.index(INDEX)
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
            seen = gl.minimum(gl.maximum(low // FOUR * FOUR, begin), end + 1)
            mbarrier.wait(q_full, done & 1)
            if gl.max(position, 0) >= 0:
                taken = seen_masses(
                    out, taken, begin, seen, q_tile, k_tiles, k_full, k_empty, qk_scale, LAYOUT,
                    STAGES,
                )  # fmt: skip
                taken = masked_masses(
                    out, taken, seen, end + 1, position, q_tile, k_tiles, k_full, k_empty, qk_scale,
                    LAYOUT, STAGES,
                )  # fmt: skip
            else:  # no query among these rows: the buffers are passed on
                for _key in range(begin, end + 1, BLOCK):
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
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [SLICES * PARTS, SLICE, 64], rows_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK, 64], k_desc.layout)
    q_tiles = q_smem._reinterpret(dtype, [SLICES, SLICE, HEAD_DIM], TILE_LAYOUT)
    k_tiles = k_smem._reinterpret(dtype, [STAGES, BLOCK, HEAD_DIM], TILE_LAYOUT)
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
                    mass_ptr, q_tiles, k_tiles, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 0,
                ),
            ),
            (
                mass_partition,
                (
                    mass_ptr, q_tiles, k_tiles, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 1,
                ),
            ),
            (
                mass_partition,
                (
                    mass_ptr, q_tiles, k_tiles, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
                    cu_seqlens_ptr, qk_scale, dense_below, first_tile, num_tiles, num_strips,
                    num_work, width, NUM_KV_HEADS, GROUP_PAD, TILE, SAMPLES, STRIDE, SINK_BLOCKS,
                    REACH_BLOCKS, SCORED_BLOCKS, SPAN, STAGES, 2,
                ),
            ),
            (
                mass_partition,
                (
                    mass_ptr, q_tiles, k_tiles, bars, strip_of_tile_ptr, strips_ptr, seq_lens_ptr,
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
        [120, 120, 120, 24],
    )  # fmt: skip

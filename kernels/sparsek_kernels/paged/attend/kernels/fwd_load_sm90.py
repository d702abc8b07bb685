"""Work items of the Hopper prefill kernel, and the warp that loads their blocks (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.gluon_names import tma_load
from sparsek_kernels.paged.kernels.pages_sm90 import NO_ROW
from sparsek_kernels.paged.kernels.tiles import (
    TOP_K,
    tile_list,
    tile_sees_all,
    tile_span,
)
from sparsek_kernels.paged.sample import CELL_BITS

CELL_MASK: gl.constexpr = gl.constexpr((1 << CELL_BITS) - 1)

ROWS: gl.constexpr = gl.constexpr(64)
BOX_BYTES: gl.constexpr = gl.constexpr(64 * 64 * 2)


@gluon.jit
def place(
    item,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, num_tiles,
    GROUP: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr, REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Work item ``item``: ``(tile, kv_head, first member, request, start, low, high,
    token_of_zero, front, selected, first_local, count)``.

    Pairs of heads of a tile are neighbours, then its chunks of 64 queries, then tiles: what runs
    together shares blocks in L2.  ``start`` is the position of row 0.
    """
    PAIRS: gl.constexpr = (GROUP + 1) // 2
    CHUNKS: gl.constexpr = TILE // ROWS
    member = item % PAIRS * 2
    chunk = item // PAIRS % CHUNKS
    tile = item // (PAIRS * CHUNKS) % num_tiles
    kv_head = item // (PAIRS * CHUNKS) // num_tiles
    request, base, low, high, token_of_zero = tile_span(
        tile, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, True, 1, TILE
    )
    start = base + chunk * ROWS
    low = gl.maximum(low, start)
    high = gl.minimum(high, start + ROWS - 1)
    policy_start = gl.maximum(low, 0) // TILE * TILE
    full = tile_sees_all(
        policy_start, dense_below, TOP_K, TILE, ROWS, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    front, selected, first_local, count = tile_list(
        policy_start, low, high, full, 0, TOP_K, ROWS, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    return (
        tile, kv_head, member, request, start, low, high, token_of_zero, front, selected,
        first_local, count,
    )  # fmt: skip


@gluon.jit
def block_page(
    entry,
    selected_ptr, table_ptr,
    front, selected, first_local, count,
    PAGE_SIZE: gl.constexpr, DRAWN: gl.constexpr,
):  # fmt: skip
    """Page of list entry ``entry``, and the row of the page where it starts; past the list, -1."""
    chosen = (entry >= front) & (entry < front + selected)
    block = gl.maximum(gl.load(selected_ptr + entry - front, mask=chosen, other=0), 0)
    if DRAWN:
        block = block & CELL_MASK
    plain = gl.where(entry < front, entry, first_local + entry - front - selected)
    start = gl.where(chosen, block, plain) * ROWS
    page = gl.load(table_ptr + start // PAGE_SIZE, mask=entry < count, other=-1)
    return page, start % PAGE_SIZE


@gluon.jit
def load_pair(
    desc, smem, full, first_buffer, column, head_row, page_rows, page_0, row_0, page_1, row_1,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Two blocks of K or V, one below the other; no page gives zeros."""
    mbarrier.expect(full, 2 * PARTS * BOX_BYTES)
    top = gl.where(page_0 < 0, NO_ROW, head_row + page_0 * page_rows + row_0)
    bottom = gl.where(page_1 < 0, NO_ROW, head_row + page_1 * page_rows + row_1)
    for part in gl.static_range(PARTS):
        buffer = first_buffer + 2 * part
        tma_load(desc, [top, column + part * 64], full, smem.index(buffer))
        tma_load(desc, [bottom, column + part * 64], full, smem.index(buffer + 1))


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc,
    q_smem, k_smem, v_smem, bars,
    selected_ptr, tiles_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, num_tiles, num_items,
    stride_it, stride_ih,
    stride_br,
    q_head_cols, k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    DRAWN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's items, as buffers become free.

    Boxes are 64 rows by 64 columns: two blocks, one below the other, make the 128 rows that the
    products read.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _tail_done = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    fetched = 0
    done = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        (
            tile, kv_head, member, request, start, low, high, token_of_zero, front, selected,
            first_local, count,
        ) = place(
            item, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, num_tiles, GROUP, TILE,
            SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
        )  # fmt: skip
        if high >= low:
            table = block_table_ptr + request.to(gl.int64) * stride_br
            chosen = selected_ptr + tile.to(gl.int64) * stride_it
            chosen += kv_head.to(gl.int64) * stride_ih
            for i in gl.static_range(2):
                head = kv_head * GROUP + gl.minimum(member + i, GROUP - 1)
                mbarrier.wait(q_empty.index(i), (done & 1) ^ 1)
                mbarrier.expect(q_full.index(i), PARTS * BOX_BYTES)
                for part in gl.static_range(PARTS):
                    tma_load(
                        q_desc, [token_of_zero + start, head * q_head_cols + part * 64],
                        q_full.index(i), q_smem.index(i * PARTS + part),
                    )  # fmt: skip
            k_row = kv_head * k_head_rows
            v_row = kv_head * v_head_rows
            k_col = kv_head * k_head_cols
            v_col = kv_head * v_head_cols
            page_0, row_0 = block_page(
                0,
                chosen,
                table,
                front,
                selected,
                first_local,
                count,
                PAGE_SIZE,
                DRAWN,
            )
            page_1, row_1 = block_page(
                1,
                chosen,
                table,
                front,
                selected,
                first_local,
                count,
                PAGE_SIZE,
                DRAWN,
            )
            for pair in range(0, (count + 1) // 2):
                # looked up a pair ahead, so that no copy waits for a load
                next_0, next_row_0 = block_page(
                    2 * pair + 2,
                    chosen,
                    table,
                    front,
                    selected,
                    first_local,
                    count,
                    PAGE_SIZE,
                    DRAWN,
                )
                next_1, next_row_1 = block_page(
                    2 * pair + 3,
                    chosen,
                    table,
                    front,
                    selected,
                    first_local,
                    count,
                    PAGE_SIZE,
                    DRAWN,
                )
                stage = fetched % STAGES
                first_buffer = stage * PARTS * 2
                free = ((fetched // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), free)
                load_pair(
                    k_desc, k_smem, k_full.index(stage), first_buffer, k_col, k_row, k_page_rows,
                    page_0, row_0, page_1, row_1, PARTS,
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), free)
                load_pair(
                    v_desc, v_smem, v_full.index(stage), first_buffer, v_col, v_row, v_page_rows,
                    page_0, row_0, page_1, row_1, PARTS,
                )  # fmt: skip
                page_0, row_0, page_1, row_1 = next_0, next_row_0, next_1, next_row_1
                fetched += 1
            done += 1

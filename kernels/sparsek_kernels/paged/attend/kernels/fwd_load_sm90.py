"""Planning and loading of the Hopper prefill kernel: a warp for each (Gluon).

The planning warp places items and looks up their first pages, while the others still work on the
items before.  The loading warp streams queries and listed blocks through shared memory with TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.gluon_names import thread_barrier, tma_load
from sparsek_kernels.common.kernels.plans_sm90 import plan_field, put_plan
from sparsek_kernels.paged.kernels.pages_sm90 import NO_ROW
from sparsek_kernels.paged.kernels.sample import entry_of
from sparsek_kernels.paged.kernels.tiles import (
    TOP_K,
    tile_list,
    tile_places,
    tile_sees_all,
    tile_span,
)

ROWS: gl.constexpr = gl.constexpr(64)
BOX_BYTES: gl.constexpr = gl.constexpr(64 * 64 * 2)
PLANS: gl.constexpr = gl.constexpr(4)
FIELDS: gl.constexpr = gl.constexpr(19)


@gluon.jit
def place(
    item,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, num_tiles,
    GROUP: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr, REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr, GROWTH: gl.constexpr,
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
    places = tile_places(policy_start, ROWS, SCORED_BLOCKS, GROWTH)
    front, selected, first_local, count = tile_list(
        policy_start, low, high, full, 0, places, TOP_K, ROWS, SINK_BLOCKS, REACH_BLOCKS
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
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Page of place ``entry`` of a list, the row of the page where it starts, and the binary log of
    its weight as bits; past the list, the page is -1."""
    chosen = (entry >= front) & (entry < front + selected)
    block, log = entry_of(gl.load(selected_ptr + entry - front, mask=chosen, other=0))
    plain = gl.where(entry < front, entry, first_local + entry - front - selected)
    start = gl.where(chosen, block, plain) * ROWS
    page = gl.load(table_ptr + start // PAGE_SIZE, mask=entry < count, other=-1)
    return page.to(gl.int32), start % PAGE_SIZE, log.to(gl.int32, bitcast=True)


@gluon.jit
def pair_pages(
    pair,
    selected_ptr, table_ptr,
    front, selected, first_local, count,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """:func:`block_page` of both blocks of pair ``pair`` of a list."""
    page_0, row_0, log_0 = block_page(
        2 * pair, selected_ptr, table_ptr, front, selected, first_local, count, PAGE_SIZE
    )
    page_1, row_1, log_1 = block_page(
        2 * pair + 1, selected_ptr, table_ptr, front, selected, first_local, count, PAGE_SIZE
    )
    return page_0, row_0, log_0, page_1, row_1, log_1


@gluon.jit
def _list_of(
    tile, kv_head, request, selected_ptr, block_table_ptr, stride_it, stride_ih, stride_br
):
    """The selected blocks of a tile and KV head, and the pages of its request."""
    chosen = selected_ptr + tile.to(gl.int64) * stride_it + kv_head.to(gl.int64) * stride_ih
    return chosen, block_table_ptr + request.to(gl.int64) * stride_br


@gluon.jit
def put_logs(logs, stage, log_0, log_1):
    """Tell the warpgroups the logs of a pair's weights, as bits, before its keys arrive."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    logs.index(2 * stage).store(gl.full([1], log_0, gl.int32, ONE))
    logs.index(2 * stage + 1).store(gl.full([1], log_1, gl.int32, ONE))
    thread_barrier()


@gluon.jit
def take_logs(logs, stage):
    """Logs of the weights of a pair of blocks, for one warpgroup."""
    log_0 = plan_field(logs, 2 * stage, 4).to(gl.float32, bitcast=True)
    log_1 = plan_field(logs, 2 * stage + 1, 4).to(gl.float32, bitcast=True)
    return log_0, log_1


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
def plan_partition(
    plans, plan_full, plan_empty, selected_ptr, tiles_ptr, block_table_ptr, seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below, num_tiles, num_items,
    stride_it, stride_ih,
    stride_br,
    GROUP: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr, REACH_BLOCKS: gl.constexpr,
    SCORED_BLOCKS: gl.constexpr, GROWTH: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Say where each item of this program lies, in order, then that there are no more.

    Items without queries are left out.  A plan is ``(valid, row, start, low, high, kv_head, member,
    count, tile, request, front, selected, first_local)`` and :func:`pair_pages` of the list's last
    pair of blocks.  ``row`` is where q begins, ``low`` and ``high`` count from there; for the rest
    see :func:`place`.
    """
    turn = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        (
            tile, kv_head, member, request, start, low, high, token_of_zero, front, selected,
            first_local, count,
        ) = place(
            item, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, num_tiles, GROUP, TILE,
            SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH,
        )  # fmt: skip
        if high >= low:
            chosen, table = _list_of(
                tile, kv_head, request, selected_ptr, block_table_ptr, stride_it, stride_ih,
                stride_br,
            )  # fmt: skip
            page_0, row_0, log_0, page_1, row_1, log_1 = pair_pages(
                (count - 1) // 2, chosen, table, front, selected, first_local, count, PAGE_SIZE
            )
            plan = (
                1, token_of_zero + start, start, low - start, high - start, kv_head, member, count,
                tile, request, front, selected, first_local, page_0, row_0, log_0, page_1, row_1,
                log_1,
            )  # fmt: skip
            put_plan(plans, plan_full, plan_empty, turn, plan, PLANS, FIELDS)
            turn += 1
    # as an item with all of its queries and no block
    end = (0, 0, 0, 0, ROWS - 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    put_plan(plans, plan_full, plan_empty, turn, end, PLANS, FIELDS)


@gluon.jit
def take_item(plans, plan_full, turn, GROUP: gl.constexpr, INDEX: gl.constexpr):
    """``(valid, start, high, head, count)`` of item ``turn``, for warpgroup ``INDEX``."""
    slot = turn % PLANS
    mbarrier.wait(plan_full.index(slot), (turn // PLANS) & 1)
    valid = plan_field(plans, slot * FIELDS, 4)
    start = plan_field(plans, slot * FIELDS + 2, 4)
    high = plan_field(plans, slot * FIELDS + 4, 4)
    kv_head = plan_field(plans, slot * FIELDS + 5, 4)
    member = plan_field(plans, slot * FIELDS + 6, 4)
    count = plan_field(plans, slot * FIELDS + 7, 4)
    head = kv_head * GROUP + gl.minimum(member + INDEX, GROUP - 1)
    return valid > 0, start, high, head, count


@gluon.jit
def take_rows(plans, plan_empty, turn, GROUP: gl.constexpr, INDEX: gl.constexpr):
    """``(row, head, low, high)`` of item ``turn``, whose plan is then given back.

    Rows ``low .. high`` are to be stored; there are none where there is no such head, or item.
    """
    slot = (turn + PLANS) % PLANS
    row = plan_field(plans, slot * FIELDS + 1, 4)
    low = plan_field(plans, slot * FIELDS + 3, 4)
    high = plan_field(plans, slot * FIELDS + 4, 4)
    kv_head = plan_field(plans, slot * FIELDS + 5, 4)
    member = plan_field(plans, slot * FIELDS + 6, 4) + INDEX
    high = gl.where((turn >= 0) & (member < GROUP), high, -1)
    thread_barrier()
    mbarrier.arrive(plan_empty.index(slot), count=1, pred=turn >= 0)
    return row, kv_head * GROUP + member, low, high


@gluon.jit
def _take_list(plans, plan_full, plan_empty, turn):
    """What the loading warp needs of a plan."""
    slot = turn % PLANS
    mbarrier.wait(plan_full.index(slot), (turn // PLANS) & 1)
    valid = plan_field(plans, slot * FIELDS, 1)
    row = plan_field(plans, slot * FIELDS + 1, 1)
    kv_head = plan_field(plans, slot * FIELDS + 5, 1)
    member = plan_field(plans, slot * FIELDS + 6, 1)
    count = plan_field(plans, slot * FIELDS + 7, 1)
    tile = plan_field(plans, slot * FIELDS + 8, 1)
    request = plan_field(plans, slot * FIELDS + 9, 1)
    front = plan_field(plans, slot * FIELDS + 10, 1)
    selected = plan_field(plans, slot * FIELDS + 11, 1)
    first_local = plan_field(plans, slot * FIELDS + 12, 1)
    page_0 = plan_field(plans, slot * FIELDS + 13, 1)
    row_0 = plan_field(plans, slot * FIELDS + 14, 1)
    log_0 = plan_field(plans, slot * FIELDS + 15, 1)
    page_1 = plan_field(plans, slot * FIELDS + 16, 1)
    row_1 = plan_field(plans, slot * FIELDS + 17, 1)
    log_1 = plan_field(plans, slot * FIELDS + 18, 1)
    thread_barrier()
    mbarrier.arrive(plan_empty.index(slot), count=1)
    return (
        valid > 0, row, kv_head, member, count, tile, request, front, selected, first_local,
        page_0, row_0, log_0, page_1, row_1, log_1,
    )  # fmt: skip


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc,
    q_smem, k_smem, v_smem, logs, plans, plan_full, plan_empty, bars,
    selected_ptr, block_table_ptr,
    stride_it, stride_ih,
    stride_br,
    q_head_cols, k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's items, as buffers become free.

    Boxes are 64 rows by 64 columns: two blocks, one below the other, make the 128 rows that the
    products read.  Pairs are taken from the end of a list, where the tile's own block lies.  Values
    are one number ahead of their keys: see ``fwd_sm90.py``.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _tail_done = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    mbarrier.arrive(v_full.index(0), count=1)
    fetched = 0
    turn = 0
    more = True
    while more:
        (
            more, row, kv_head, member, count, tile, request, front, selected, first_local,
            page_0, row_0, log_0, page_1, row_1, log_1,
        ) = _take_list(plans, plan_full, plan_empty, turn)  # fmt: skip
        for i in gl.static_range(2):
            slot = turn % 2 * 2 + i
            mbarrier.wait(q_empty.index(slot), ((turn // 2) & 1) ^ 1)
            if more:
                head = kv_head * GROUP + gl.minimum(member + i, GROUP - 1)
                mbarrier.expect(q_full.index(slot), PARTS * BOX_BYTES)
                for part in gl.static_range(PARTS):
                    tma_load(
                        q_desc, [row, head * q_head_cols + part * 64], q_full.index(slot),
                        q_smem.index(slot * PARTS + part),
                    )  # fmt: skip
            else:
                mbarrier.arrive(q_full.index(slot), count=1)
        chosen, table = _list_of(
            tile, kv_head, request, selected_ptr, block_table_ptr, stride_it, stride_ih, stride_br
        )
        k_row = kv_head * k_head_rows
        v_row = kv_head * v_head_rows
        k_col = kv_head * k_head_cols
        v_col = kv_head * v_head_cols
        pairs = (count + 1) // 2
        for pair in range(0, pairs):
            # looked up a pair ahead, so that no copy waits for a load
            next_0, next_row_0, next_log_0, next_1, next_row_1, next_log_1 = pair_pages(
                gl.maximum(pairs - 2 - pair, 0), chosen, table, front, selected, first_local, count,
                PAGE_SIZE,
            )  # fmt: skip
            stage = fetched % K_STAGES
            mbarrier.wait(k_empty.index(stage), ((fetched // K_STAGES) & 1) ^ 1)
            put_logs(logs, stage, log_0, log_1)
            load_pair(
                k_desc, k_smem, k_full.index(stage), stage * PARTS * 2, k_col, k_row, k_page_rows,
                page_0, row_0, page_1, row_1, PARTS,
            )  # fmt: skip
            fetched += 1
            stage = fetched % V_STAGES
            mbarrier.wait(v_empty.index(stage), ((fetched // V_STAGES) & 1) ^ 1)
            load_pair(
                v_desc, v_smem, v_full.index(stage), stage * PARTS * 2, v_col, v_row, v_page_rows,
                page_0, row_0, page_1, row_1, PARTS,
            )  # fmt: skip
            page_0, row_0, log_0 = next_0, next_row_0, next_log_0
            page_1, row_1, log_1 = next_1, next_row_1, next_log_1
        turn += 1
    # The end is an item of one pair that nobody fills.
    stage = fetched % K_STAGES
    mbarrier.wait(k_empty.index(stage), ((fetched // K_STAGES) & 1) ^ 1)
    mbarrier.arrive(k_full.index(stage), count=1)

"""Planning and loading of the Hopper forward kernel: a warp for each (Gluon).

The planning warp draws items from a queue, because their lists differ in length, and counts their
blocks while the others still work on the items before.  The loading warp streams queries and listed
keys and values through shared memory with TMA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.gluon_names import thread_barrier, tma_load
from sparsek_kernels.common.kernels.plans_sm90 import plan_field, put_plan

ROWS: gl.constexpr = gl.constexpr(64)
KEYS: gl.constexpr = gl.constexpr(128)
SCAN: gl.constexpr = gl.constexpr(128)
PLANS: gl.constexpr = gl.constexpr(4)
FIELDS: gl.constexpr = gl.constexpr(8)
NO_BLOCK: gl.constexpr = gl.constexpr(0x00800000)


@gluon.jit
def _blocks_below(list_ptr, begin, end, bounds):
    """How many of the ascending entries ``[begin, end)`` are below each of two bounds."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    low = 0
    high = 0
    for first in range(begin, end, SCAN):
        index = first + gl.arange(0, SCAN, layout=LAYOUT)
        entry = gl.load(list_ptr + index, mask=index < end, other=2147483647)
        low += gl.sum((entry < bounds[0]).to(gl.int32), 0)
        high += gl.sum((entry < bounds[1]).to(gl.int32), 0)
    return low, high


@gluon.jit
def plan_partition(
    queue_ptr, crow_ptr, col_ptr, plans, plan_full, plan_empty,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Draw items and say where each lies, until there are no more.

    A plan is ``(valid, batch, kv_head, member, row, begin, count, full)``: whether there is an
    item, its first head within the group, its first query, and of the ``count`` listed blocks that
    are not wholly in the future, from entry ``begin`` on, the first ``full`` are wholly seen.

    Heads of a group are neighbours, then rows of blocks, the longest first: what runs together
    shares K and V, and the last items are short.
    """
    HEADS: gl.constexpr = 2 * ROWS // BLOCK
    MEMBERS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    turn = 0
    more = True
    while more:
        item = gl.atomic_add(queue_ptr, 1, sem="relaxed")
        more = item < num_items
        member = item % MEMBERS * HEADS
        rest = item // MEMBERS
        kv_head = rest // num_rows % num_kv_heads
        batch = rest // num_rows // num_kv_heads
        row = 0
        begin = 0
        count = 0
        full = 0
        if more:
            pattern = (kv_head * GROUP + member) // pattern_heads
            block_row = gl.load(queue_ptr + 1 + pattern * num_rows + rest % num_rows)
            row = block_row * BLOCK
            crow = crow_ptr + pattern * (num_rows + 1) + block_row
            begin = gl.load(crow)
            end = gl.load(crow + 1)
            count = end - begin
            full = count
            if CAUSAL:
                first = row + num_k - num_q
                last = gl.minimum(row + BLOCK, num_q) + num_k - num_q
                bounds = (gl.maximum(first + 1, 0) // BLOCK, gl.cdiv(gl.maximum(last, 0), BLOCK))
                full, count = _blocks_below(col_ptr, begin, end, bounds)
        plan = (more.to(gl.int32), batch, kv_head, member, row, begin, count, full)
        put_plan(plans, plan_full, plan_empty, turn, plan, PLANS, FIELDS)
        turn += 1


@gluon.jit
def take_plan(plans, plan_full, plan_empty, turn, WARPS: gl.constexpr):
    """The plan of this program's ``turn``-th item."""
    slot = turn % PLANS
    mbarrier.wait(plan_full.index(slot), (turn // PLANS) & 1)
    valid = plan_field(plans, slot * FIELDS + 0, WARPS)
    batch = plan_field(plans, slot * FIELDS + 1, WARPS)
    kv_head = plan_field(plans, slot * FIELDS + 2, WARPS)
    member = plan_field(plans, slot * FIELDS + 3, WARPS)
    row = plan_field(plans, slot * FIELDS + 4, WARPS)
    begin = plan_field(plans, slot * FIELDS + 5, WARPS)
    count = plan_field(plans, slot * FIELDS + 6, WARPS)
    full = plan_field(plans, slot * FIELDS + 7, WARPS)
    thread_barrier()
    mbarrier.arrive(plan_empty.index(slot), count=1)
    return valid > 0, batch, kv_head, member, row, begin, count, full


@gluon.jit
def _load_tile(
    desc, smem, full, empty, number, first_row, column, col_ptr, begin, entry, count,
    BLOCK: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """128 listed rows of K or V, block below block, as tile ``number``; past the list, zeros."""
    PER_TILE: gl.constexpr = KEYS // BLOCK
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), PER_TILE * PARTS * desc.block_type.nbytes)
    for i in gl.static_range(PER_TILE):
        inside = entry + i < count
        block = gl.load(col_ptr + begin + entry + i, mask=inside, other=NO_BLOCK)
        at = gl.where(inside, first_row + block * BLOCK, NO_BLOCK * ROWS)
        for part in gl.static_range(PARTS):
            tma_load(
                desc, [at, column + part * 64], full.index(stage),
                smem.index((stage * PARTS + part) * PER_TILE + i),
            )  # fmt: skip


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, plans, plan_full, plan_empty, bars, col_ptr,
    q_batch_rows, k_batch_rows, v_batch_rows,
    q_head_cols, k_head_cols, v_head_cols,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's items, as buffers become free.

    Tiles are taken from the end of a list, where blocks that are seen in part lie.  Values are one
    number ahead of their keys: see ``fwd_sm90.py``.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    PER_TILE: gl.constexpr = KEYS // BLOCK
    mbarrier.arrive(v_full.index(0), count=1)
    fetched = 0
    turn = 0
    more = True
    while more:
        more, batch, kv_head, member, row, begin, count, _full = take_plan(
            plans, plan_full, plan_empty, turn, 1
        )
        slot = turn % 2
        mbarrier.wait(q_empty.index(slot), ((turn // 2) & 1) ^ 1)
        if more:
            mbarrier.expect(q_full.index(slot), 2 * PARTS * q_desc.block_type.nbytes)
            for i in gl.static_range(2):
                if BLOCK == 2 * ROWS:
                    head = kv_head * GROUP + member
                    q_row = row + i * ROWS
                else:
                    head = kv_head * GROUP + gl.minimum(member + i, GROUP - 1)
                    q_row = row
                for part in gl.static_range(PARTS):
                    tma_load(
                        q_desc, [batch * q_batch_rows + q_row, head * q_head_cols + part * 64],
                        q_full.index(slot), q_smem.index((slot * 2 + i) * PARTS + part),
                    )  # fmt: skip
            tiles = gl.maximum(gl.cdiv(count, PER_TILE), 1)
            for tile in range(tiles):
                entry = (tiles - 1 - tile) * PER_TILE
                _load_tile(
                    k_desc, k_smem, k_full, k_empty, fetched, batch * k_batch_rows,
                    kv_head * k_head_cols, col_ptr, begin, entry, count, BLOCK, PARTS,
                    STAGES,
                )  # fmt: skip
                _load_tile(
                    v_desc, v_smem, v_full, v_empty, fetched + 1, batch * v_batch_rows,
                    kv_head * v_head_cols, col_ptr, begin, entry, count, BLOCK, PARTS,
                    STAGES,
                )  # fmt: skip
                fetched += 1
        turn += 1
    # The end is an item of one tile that nobody fills.
    stage = fetched % STAGES
    mbarrier.arrive(q_full.index((turn - 1) % 2), count=1)
    mbarrier.wait(k_empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
    mbarrier.arrive(k_full.index(stage), count=1)

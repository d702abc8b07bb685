"""Prefill attention over selected blocks for Hopper: a warp plans, a warp loads, two warpgroups
compute (Gluon).

The rule and the maths: see ``attend.py``.  A persistent program takes items: pairs of query heads
of a KV head, 64 query rows each.  The loading warp walks the tile's list of blocks and streams two
of them at a time through shared memory with TMA; each warpgroup owns one head and issues ``q k_j``
and ``p_{j-1} v_{j-1}`` together, so that the softmax of one pair of blocks overlaps the second
product of the pair before (FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2).

The same holds from item to item, since the pairs of all items are one sequence.  The last product
of an item is issued before the first of the next, and its rows are stored while that goes on.  Pair
``j`` of keys and pair ``j - 1`` of values therefore have the same number; number 0 of the values is
never filled, and what it gives is not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier, tma_store
from sparsek_kernels.common.kernels.plans_sm90 import plan_ring
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.kernels.softmax_sm90 import anchor, lane_sums
from sparsek_kernels.paged.attend.kernels.fwd_load_sm90 import (
    FIELDS,
    PLANS,
    ROWS,
    load_partition,
    plan_partition,
    take_item,
    take_logs,
    take_rows,
)

PAIR: gl.constexpr = gl.constexpr(128)


@gluon.jit
def zero_tail(
    v_smem, first_buffer, num_valid, both_done, phase, PARTS: gl.constexpr, INDEX: gl.constexpr
):
    """Clear the rows from ``num_valid`` on of a block of V: they may hold NaN.

    The warpgroups share the columns, and each waits for the other.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    if INDEX < PARTS:
        buffer = v_smem.index(first_buffer + 2 * INDEX)
        held = buffer.load(LAYOUT)
        buffer.store(gl.where((row < num_valid)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(both_done, count=1)
    mbarrier.wait(both_done, phase & 1)


@gluon.jit
def mask_pair(s, position, first, second, S_LAYOUT: gl.constexpr):
    """``-inf`` where a row does not see a key; the halves start at ``first`` and ``second``."""
    column = gl.arange(0, PAIR, layout=gl.SliceLayout(0, S_LAYOUT))
    key = gl.where(column < ROWS, first + column, second + column - ROWS)
    return gl.where(key[None, :] <= position[:, None], s, float("-inf"))


@gluon.jit
def weigh_pair(s, log_0, log_1, m, total, scale_log2):
    """Fold a pair of blocks of raw scores ``s`` into the online softmax; masked ones are ``-inf``.

    A block's keys count ``2 ** log`` times.  Returns the weights, the new maxima, the new sums of
    lanes, and the factor for the old output.
    """
    LANES: gl.constexpr = total.type.layout
    halves = s.reshape([ROWS, 2, ROWS])
    most = gl.max(halves, 2)  # [ROWS, 2]
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, most.type.layout))
    log = gl.where(half == 0, log_0, log_1)[None, :]
    m_new = gl.maximum(m, gl.convert_layout(gl.max(most * scale_log2 + log, 1), m.type.layout))
    m_halves = gl.convert_layout(m_new, gl.SliceLayout(1, most.type.layout))[:, None]
    p = gl.exp2(halves * scale_log2 + (log - m_halves)[:, :, None]).reshape([ROWS, PAIR])
    p = gl.convert_layout(p, s.type.layout)
    alpha = gl.exp2(m - m_new)
    alpha_lanes = gl.convert_layout(alpha, gl.SliceLayout(1, LANES))
    return p, m_new, total * alpha_lanes[:, None] + lane_sums(p, LANES), alpha


@gluon.jit
def attend_pairs(
    acc, p, m, total, fetched, pairs, q_tile, k_wide, v_wide, logs, k_full, k_empty, v_full,
    v_empty, anchor_ptr,
    qk_scale,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """All pairs of an item but the first.

    ``p`` holds the weights of the pair before, not yet applied.
    """
    for _pair in range(1, pairs):
        stage = fetched % K_STAGES
        before = fetched % V_STAGES
        mbarrier.wait(k_full.index(stage), (fetched // K_STAGES) & 1)
        log_0, log_1 = take_logs(logs, stage)
        zero = gl.zeros([ROWS, PAIR], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), (fetched // V_STAGES) & 1)
        acc_token = warpgroup_mma(p, v_wide.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        weights, m, total, alpha = weigh_pair(s, log_0, log_1, m, total, qk_scale)
        p_next = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
        total = anchor(total, anchor_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_token, p, p_next])
        mbarrier.arrive(v_empty.index(before), count=1)
        p = p_next
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        fetched += 1
    return acc, p, m, total, fetched


@gluon.jit
def store_rows(
    acc, total, v_scale, out_ptr, out_desc, out_wide, out_smem, first_box, row, head, low, high,
    stride_ot, stride_oh,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Rows ``low .. high`` of a finished item, if any.

    All of them go by a copy that goes on meanwhile, out of the item's own queries' memory.  Others
    lie beside rows of other requests or heads, and go straight.
    """
    O_LAYOUT: gl.constexpr = acc.type.layout
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, O_LAYOUT))
    acc = acc * (v_scale / total)[:, None]
    out = acc.to(out_wide.dtype)
    if (low == 0) & (high == ROWS - 1):
        out_wide.store(out)
        fence_async_shared()
        thread_barrier()
        for part in gl.static_range(HEAD_DIM // 64):
            box = out_smem.index(first_box + part)
            tma_store(out_desc, [row, head * stride_oh + part * 64], box)
    elif high >= low:
        held = gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
        column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
        base = out_ptr + head.to(gl.int64) * stride_oh
        offsets = (row + held).to(gl.int64)[:, None] * stride_ot + column[None, :]
        mask = (held >= low) & (held <= high)
        gl.store(base + offsets, out, mask=mask[:, None])


@gluon.jit
def attend_partition(
    out_ptr, out_desc, sinks_ptr,
    q_wide, q_smem, k_wide, v_wide, v_smem, logs, plans, plan_full, plan_empty, bars,
    qk_scale, v_scale,
    stride_ot, stride_oh,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_SINKS: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: one head of each item, from scores to output."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tail_done = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIR, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # Of each row, a sum for each of the four lanes that share it.
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    p = gl.zeros([ROWS, PAIR], v_wide.dtype, P_LAYOUT)
    total = gl.full([ROWS, 4], 1.0, gl.float32, LANES)
    fetched = 0
    turn = 0
    tails = 0
    more = True
    while more:
        before = fetched % V_STAGES
        mbarrier.wait(v_full.index(before), (fetched // V_STAGES) & 1)
        acc_token = warpgroup_mma(p, v_wide.index(before), acc, is_async=True)
        row, head, low, high = take_rows(plans, plan_empty, turn - 1, GROUP, INDEX)
        more, start, last_row, head_of_item, count = take_item(plans, plan_full, turn, GROUP, INDEX)
        slot = turn % 2 * 2 + INDEX
        q_tile = q_wide.index(slot)
        stage = fetched % K_STAGES
        mbarrier.wait(q_full.index(slot), (turn // 2) & 1)
        mbarrier.wait(k_full.index(stage), (fetched // K_STAGES) & 1)
        log_0, log_1 = take_logs(logs, stage)
        zero = gl.zeros([ROWS, PAIR], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        acc, p = warpgroup_mma_wait(1, deps=[acc_token, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        last = (turn + 1) % 2 * 2 + INDEX
        store_rows(
            acc, total, v_scale, out_ptr, out_desc, q_wide.index(last), q_smem, last * PARTS, row,
            head, low, high, stride_ot, stride_oh, HEAD_DIM,
        )  # fmt: skip
        if HAS_SINKS:
            logit = gl.load(sinks_ptr + head_of_item).to(gl.float32) * LOG2E
            m = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT) + logit
            first_lane = gl.arange(0, 4, gl.SliceLayout(0, LANES)) == 0
            counted = gl.convert_layout(m, gl.SliceLayout(1, LANES)) > float("-inf")
            total = gl.where(counted[:, None] & first_lane[None, :], 1.0, 0.0)
        else:
            m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
            total = gl.zeros([ROWS, 4], gl.float32, LANES)
        s = warpgroup_mma_wait(0, deps=[s_token])
        # the last block of the list is the tile's own; an odd list ends with half a pair
        odd = count % 2
        first_key = gl.where(odd == 1, start, 0)
        second_key = gl.where(odd == 1, 0x70000000, start)
        position = start + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        s = mask_pair(s, position, first_key, second_key, S_LAYOUT)
        weights, m, total, _alpha = weigh_pair(s, log_0, log_1, m, total, qk_scale)
        p = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
        total = anchor(total, out_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(q_empty.index(last), count=1, pred=turn > 0)
        fetched += 1
        if last_row < ROWS - 1:
            own = fetched % V_STAGES
            mbarrier.wait(v_full.index(own), (fetched // V_STAGES) & 1)
            own_half = own * PARTS * 2 + 1 - odd
            zero_tail(v_smem, own_half, last_row + 1, tail_done, tails, PARTS, INDEX)
            tails += 1
        acc, p, m, total, fetched = attend_pairs(
            gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT), p, m, total, fetched,
            (count + 1) // 2, q_tile, k_wide, v_wide, logs, k_full, k_empty, v_full, v_empty,
            out_ptr, qk_scale, K_STAGES, V_STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        turn += 1


@gluon.jit(do_not_specialize=["dense_below", "num_tiles", "num_items"])
def attend_hopper_kernel(
    out_ptr, out_desc, q_desc, k_desc, v_desc, sinks_ptr, selected_ptr, tiles_ptr, block_table_ptr,
    seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, v_scale, dense_below, num_tiles, num_items,
    stride_ot, stride_oh,
    stride_it, stride_ih,
    stride_br,
    q_head_cols, k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr, GROWTH: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HAS_SINKS: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor; ``num_items`` pairs of heads of 64 queries.

    ``*_desc`` describe the output, q, K and V as matrices in boxes of 64 x 64; ``*_rows`` and
    ``*_cols`` are the distances between pages and heads in them.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAIR, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [4 * PARTS, ROWS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [K_STAGES * PARTS * 2, ROWS, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [V_STAGES * PARTS * 2, ROWS, 64], v_desc.layout)
    q_wide = reinterpret(q_smem, dtype, [4, ROWS, HEAD_DIM], WIDE)
    k_wide = reinterpret(k_smem, dtype, [K_STAGES, PAIR, HEAD_DIM], WIDE)
    v_wide = reinterpret(v_smem, dtype, [V_STAGES, PAIR, HEAD_DIM], WIDE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    logs = gl.allocate_shared_memory(gl.int32, [2 * K_STAGES, 1], FLAT)
    plans, plan_full, plan_empty = plan_ring(PLANS, FIELDS, 3)
    q_full, q_empty = ring_barriers(4, 1, 1)
    k_full, k_empty = ring_barriers(K_STAGES, 1, 2)
    v_full, v_empty = ring_barriers(V_STAGES, 1, 2)
    tail_done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tail_done, count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, tail_done)
    gl.warp_specialize(
        [
            (attend_partition, (
                out_ptr, out_desc, sinks_ptr, q_wide, q_smem, k_wide, v_wide, v_smem, logs, plans,
                plan_full, plan_empty, bars, qk_scale, v_scale, stride_ot, stride_oh, GROUP,
                HEAD_DIM, HAS_SINKS, K_STAGES, V_STAGES, 0,
            )),
            (attend_partition, (
                out_ptr, out_desc, sinks_ptr, q_wide, q_smem, k_wide, v_wide, v_smem, logs, plans,
                plan_full, plan_empty, bars, qk_scale, v_scale, stride_ot, stride_oh, GROUP,
                HEAD_DIM, HAS_SINKS, K_STAGES, V_STAGES, 1,
            )),
            (load_partition, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, logs, plans, plan_full, plan_empty,
                bars, selected_ptr, block_table_ptr, stride_it, stride_ih, stride_br, q_head_cols,
                k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols, GROUP,
                HEAD_DIM, PAGE_SIZE, K_STAGES, V_STAGES,
            )),
            (plan_partition, (
                plans, plan_full, plan_empty, selected_ptr, tiles_ptr, block_table_ptr,
                seq_lens_ptr, cu_seqlens_ptr, dense_below, num_tiles, num_items, stride_it,
                stride_ih, stride_br, GROUP, TILE, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, GROWTH,
                PAGE_SIZE,
            )),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip

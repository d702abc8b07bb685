"""Prefill attention over selected blocks for Hopper: one loading warp, two warpgroups (Gluon).

The rule and the maths: see ``attend.py``.  A persistent program takes pairs of
query heads of a KV head, 64 query rows each.  The loading warp walks the tile's list of blocks and
streams two of them at a time through shared memory with TMA; each warpgroup owns one head and
issues ``q k_j`` and ``p_{j-1} v_{j-1}`` together, so that the softmax of one pair of blocks
overlaps the second product of the pair before (FlashAttention-3, arXiv 2407.08608, sections 3.1
and 3.2).
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

from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.kernels.softmax_sm90 import anchor, softmax_step
from sparsek_kernels.paged.attend.kernels.fwd_load_sm90 import ROWS, load_partition, place
from sparsek_kernels.paged.sample import CELL_BITS as _CELL_BITS
from sparsek_kernels.paged.sample import STEPS as _STEPS

CELL_BITS: gl.constexpr = gl.constexpr(_CELL_BITS)
STEPS: gl.constexpr = gl.constexpr(_STEPS)
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
def pair_logs(pair, chosen, front, selected):
    """Base-2 logs of the weights of a pair of blocks.

    Where an entry is none the log is a number, as in ``read_entry``.
    """
    entry_0 = 2 * pair - front
    entry_1 = entry_0 + 1
    first = gl.load(chosen + entry_0, mask=(entry_0 >= 0) & (entry_0 < selected), other=0)
    second = gl.load(chosen + entry_1, mask=(entry_1 >= 0) & (entry_1 < selected), other=0)
    log_0 = gl.where(first < 0, -1.0e30, (first >> CELL_BITS).to(gl.float32) * (1.0 / STEPS))
    log_1 = gl.where(second < 0, -1.0e30, (second >> CELL_BITS).to(gl.float32) * (1.0 / STEPS))
    return log_0, log_1


@gluon.jit
def weigh_pair(s, m, total, qk_scale, log_0, log_1):
    """``softmax_step`` of two blocks, to whose logits these logs are added, one to each block's.

    They are part of what is subtracted from logits: a key takes as many instructions as without.
    """
    S_LAYOUT: gl.constexpr = s.type.layout
    blocks = gl.reshape(s, [ROWS, 2, ROWS])
    top = gl.max(blocks, axis=2) * qk_scale  # [ROWS, 2]
    half = gl.arange(0, 2, gl.SliceLayout(0, top.type.layout))
    log = gl.where(half == 0, log_0, log_1)[None, :]
    m_new = gl.maximum(m, gl.convert_layout(gl.max(top + log, axis=1), m.type.layout))
    alpha = gl.exp2(m - m_new)
    below = gl.convert_layout(m_new, gl.SliceLayout(1, top.type.layout))[:, None] - log
    p = gl.reshape(gl.exp2(blocks * qk_scale - gl.expand_dims(below, 2)), [ROWS, PAIR])
    p = gl.convert_layout(p, S_LAYOUT, assert_trivial=True)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def attend_pairs(
    acc, p, m, total, fetched, log_0, log_1, first, last, q_tile, k_wide, v_wide, k_full, k_empty,
    v_full, v_empty,
    anchor_ptr, chosen,
    front, selected, position, first_key, second_key, qk_scale,
    MASKED: gl.constexpr, DRAWN: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pairs ``first .. last``; ``p`` holds the weights of the pair before, not yet applied.

    The logs of a pair's weights are read one pair ahead, so that nothing waits for them.
    """
    for pair in range(first, last):
        if DRAWN:
            next_0, next_1 = pair_logs(pair + 1, chosen, front, selected)
        stage = fetched % STAGES
        before = (fetched - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (fetched // STAGES) & 1)
        zero = gl.zeros([ROWS, PAIR], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((fetched - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_wide.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        if MASKED:
            s = mask_pair(s, position, first_key, second_key, S_LAYOUT)
        if DRAWN:
            weights, m, total, alpha = weigh_pair(s, m, total, qk_scale, log_0, log_1)
            log_0, log_1 = next_0, next_1
        else:
            weights, m, total, alpha = softmax_step(s, m, total, qk_scale, False)
        p_next = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
        total = anchor(total, anchor_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_token, p, p_next])
        mbarrier.arrive(v_empty.index(before), count=1)
        p = p_next
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        fetched += 1
    return acc, p, m, total, fetched, log_0, log_1


@gluon.jit
def attend_partition(
    out_ptr, sinks_ptr, selected_ptr,
    q_wide, k_wide, v_wide, v_smem, bars,
    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, v_scale, dense_below, num_tiles, num_items,
    stride_ot, stride_oh,
    stride_it, stride_ih,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr, HAS_SINKS: gl.constexpr,
    DRAWN: gl.constexpr, STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: one head of each pair, from scores to output."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tail_done = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIR, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_tile = q_wide.index(INDEX)
    fetched = 0
    done = 0
    tails = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        (
            tile, kv_head, member, _request, start, low, high, token_of_zero, front, selected,
            _first_local, count,
        ) = place(
            item, tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, num_tiles, GROUP, TILE,
            SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS,
        )  # fmt: skip
        if high >= low:
            head = kv_head * GROUP + gl.minimum(member + INDEX, GROUP - 1)
            position = start + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            # the last block of the list is the tile's own; an odd list ends with half a pair
            odd = count % 2
            first_key = gl.where(odd == 1, start, 0)
            second_key = gl.where(odd == 1, 0x70000000, start)
            pairs = (count + 1) // 2
            if HAS_SINKS:
                logit = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
                m = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT) + logit
                total = gl.where(m == float("-inf"), 0.0, 1.0)
            else:
                m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
                total = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
            chosen = selected_ptr + tile.to(gl.int64) * stride_it
            chosen += kv_head.to(gl.int64) * stride_ih
            log_0, log_1 = qk_scale, qk_scale  # of no meaning where blocks are not drawn
            if DRAWN:
                log_0, log_1 = pair_logs(0, chosen, front, selected)
                next_0, next_1 = pair_logs(1, chosen, front, selected)
            stage = fetched % STAGES
            mbarrier.wait(q_full.index(INDEX), done & 1)
            mbarrier.wait(k_full.index(stage), (fetched // STAGES) & 1)
            zero = gl.zeros([ROWS, PAIR], gl.float32, S_LAYOUT)
            s_token = warpgroup_mma(
                q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[s_token])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if pairs == 1:
                s = mask_pair(s, position, first_key, second_key, S_LAYOUT)
            if DRAWN:
                weights, m, total, _alpha = weigh_pair(s, m, total, qk_scale, log_0, log_1)
                log_0, log_1 = next_0, next_1
            else:
                weights, m, total, _alpha = softmax_step(s, m, total, qk_scale, False)
            p = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
            fetched += 1
            acc, p, m, total, fetched, log_0, log_1 = attend_pairs(
                acc, p, m, total, fetched, log_0, log_1, 1, pairs - 1, q_tile, k_wide, v_wide,
                k_full, k_empty, v_full, v_empty, out_ptr, chosen, front, selected, position,
                first_key, second_key, qk_scale, False, DRAWN, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
            acc, p, m, total, fetched, log_0, log_1 = attend_pairs(
                acc, p, m, total, fetched, log_0, log_1, gl.maximum(pairs - 1, 1), pairs, q_tile,
                k_wide, v_wide, k_full, k_empty, v_full, v_empty, out_ptr, chosen, front, selected,
                position, first_key, second_key, qk_scale, True, DRAWN, STAGES, S_LAYOUT, O_LAYOUT,
                P_LAYOUT,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(INDEX), count=1)
            before = (fetched - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((fetched - 1) // STAGES) & 1)
            if high < start + ROWS - 1:
                own_half = before * PARTS * 2 + 1 - odd
                zero_tail(v_smem, own_half, high - start + 1, tail_done, tails, PARTS, INDEX)
                tails += 1
            acc_token = warpgroup_mma(p, v_wide.index(before), acc, is_async=True)
            inverse = v_scale / total
            acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
            # straight from the accumulator's layout: shared memory is full of K and V
            row = start + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
            column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
            base = out_ptr + head.to(gl.int64) * stride_oh
            offsets = (token_of_zero + row).to(gl.int64)[:, None] * stride_ot + column[None, :]
            mask = (row >= low) & (row <= high) & (member + INDEX < GROUP)
            gl.store(base + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask[:, None])
            done += 1


@gluon.jit(do_not_specialize=["dense_below", "num_tiles", "num_items"])
def attend_hopper_kernel(
    out_ptr, q_desc, k_desc, v_desc, sinks_ptr, selected_ptr, tiles_ptr, block_table_ptr,
    seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, v_scale, dense_below, num_tiles, num_items,
    stride_ot, stride_oh,
    stride_it, stride_ih,
    stride_br,
    q_head_cols, k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SINK_BLOCKS: gl.constexpr,
    REACH_BLOCKS: gl.constexpr, SCORED_BLOCKS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HAS_SINKS: gl.constexpr, DRAWN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor; ``num_items`` pairs of heads of 64 queries.

    ``*_desc`` describe q, K and V as matrices in boxes of 64 x 64; ``*_rows`` and ``*_cols`` are
    the distances between pages and heads in them.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAIR, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS * 2, ROWS, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS * 2, ROWS, 64], v_desc.layout)
    q_wide = reinterpret(q_smem, dtype, [2, ROWS, HEAD_DIM], WIDE)
    k_wide = reinterpret(k_smem, dtype, [STAGES, PAIR, HEAD_DIM], WIDE)
    v_wide = reinterpret(v_smem, dtype, [STAGES, PAIR, HEAD_DIM], WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    tail_done = gl.allocate_shared_memory(gl.int64, [1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(tail_done, count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, tail_done)
    gl.warp_specialize(
        [
            (
                attend_partition,
                (
                    out_ptr, sinks_ptr, selected_ptr, q_wide, k_wide, v_wide, v_smem, bars,
                    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, qk_scale, v_scale, dense_below,
                    num_tiles, num_items, stride_ot, stride_oh, stride_it, stride_ih, GROUP,
                    HEAD_DIM, TILE, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, HAS_SINKS, DRAWN,
                    STAGES, 0,
                ),
            ),
            (
                attend_partition,
                (
                    out_ptr, sinks_ptr, selected_ptr, q_wide, k_wide, v_wide, v_smem, bars,
                    tiles_ptr, seq_lens_ptr, cu_seqlens_ptr, qk_scale, v_scale, dense_below,
                    num_tiles, num_items, stride_ot, stride_oh, stride_it, stride_ih, GROUP,
                    HEAD_DIM, TILE, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, HAS_SINKS, DRAWN,
                    STAGES, 1,
                ),
            ),
            (
                load_partition,
                (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, selected_ptr, tiles_ptr,
                    block_table_ptr, seq_lens_ptr, cu_seqlens_ptr, dense_below, num_tiles,
                    num_items, stride_it, stride_ih, stride_br, q_head_cols, k_page_rows,
                    k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols, GROUP,
                    HEAD_DIM, TILE, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS, PAGE_SIZE,
                    DRAWN, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

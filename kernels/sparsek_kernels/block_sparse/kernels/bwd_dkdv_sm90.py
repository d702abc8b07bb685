"""Gradients of keys and values for Hopper: one loading warp, two warpgroups that compute (Gluon).

The maths stands in ``bwd.py``.  A program owns a block of keys of one KV head and a part of the
query blocks that list it (``plan_columns``): both accumulators stay in registers, and a column
that many queries list does not keep one multiprocessor busy alone.  The loading warp streams 64
queries of one head at a time through shared memory.  A warpgroup works on transposed scores, so
that weights and their gradients are operands of the second products as they lie in registers; the
two warpgroups never wait for each other.  Of a block of 128 keys each owns half; a block of 64 is
shared, and each takes every second step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import (
    async_load,
    reinterpret,
    thread_barrier,
    tma_load,
)
from sparsek_kernels.common.kernels.softmax import LOG2E

ROWS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _blocks_below(list_ptr, begin, end, bound):
    """How many of the ascending entries ``[begin, end)`` are below ``bound``; four warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    count = 0
    for first in range(begin, end, 128):
        index = first + gl.arange(0, 128, layout=LAYOUT)
        entry = gl.load(list_ptr + index, mask=index < end, other=2147483647)
        count += gl.sum((entry < bound).to(gl.int32), 0)
    return count


@gluon.jit
def _place(
    ccol_ptr, row_ptr, ends_ptr, columns_ptr,
    num_q, num_k, num_cols, num_patterns, num_slots, num_parts, pattern_heads, pattern_kv_heads,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """What this program owns.

    Returns ``(valid, batch, head, column, begin, count, masked, part)``: from entry ``begin`` on
    ``count`` query blocks, of which the first ``masked`` see some keys of the column only; ``head``
    is the first that reads this list, and ``part`` where sums go, or -1 if they are all there is.
    """
    pid = gl.program_id(0)
    num_batch = gl.num_programs(0) // (num_slots * pattern_kv_heads)
    slot = pid // (num_batch * pattern_kv_heads)
    batch = pid // pattern_kv_heads % num_batch
    lane = pid % pattern_kv_heads
    num_places = num_cols * num_patterns
    place = gl.load(columns_ptr + slot)
    valid = place < num_places
    place = gl.minimum(place, num_places - 1)
    column = place // num_patterns
    pattern = place % num_patterns
    first_slot = gl.load(ends_ptr + place - 1, mask=place > 0, other=0)
    first_part = gl.load(ends_ptr + num_places + place - 1, mask=place > 0, other=0)
    shares = gl.load(ends_ptr + place) - first_slot
    parts = gl.load(ends_ptr + num_places + place) - first_part
    at = slot - first_slot
    part = (batch * num_parts + first_part + at) * pattern_kv_heads + lane
    part = gl.where(parts > 0, part, -1)
    head = pattern * pattern_heads + lane * GROUP
    ccol = ccol_ptr + pattern * (num_cols + 1) + column
    begin = gl.load(ccol)
    end = gl.load(ccol + 1)
    share = gl.cdiv(end - begin, shares)
    begin = gl.minimum(begin + at * share, end)
    end = gl.minimum(begin + share, end)
    masked = begin * 0
    if CAUSAL:
        offset = num_k - num_q
        key_first = gl.maximum(column * BLOCK - offset, 0)  # first query that sees a key
        key_last = gl.maximum(column * BLOCK + BLOCK - 1 - offset, 0)  # ... all of them
        hidden = _blocks_below(row_ptr, begin, end, key_first // BLOCK)
        masked = _blocks_below(row_ptr, begin, end, gl.cdiv(key_last, BLOCK)) - hidden
        begin += hidden
    return valid, batch, head, column, begin, gl.where(valid, end - begin, 0), masked, part


@gluon.jit
def _stage(step, PER_BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Buffer of a step of 64 queries.

    With blocks of 64 the first warpgroup takes the even steps and the second the odd ones: the
    first half of the buffers is then for even steps, the other half for odd ones.
    """
    if PER_BLOCK == 2:
        return step % STAGES
    else:
        return step % 2 * (STAGES // 2) + step // 2 % (STAGES // 2)


@gluon.jit
def _load_partition(
    q_desc, g_desc, k_desc, v_desc, lse_ptr, delta_ptr, row_ptr,
    q_smem, g_smem, k_smem, v_smem, lse_smem, delta_smem, bars,
    batch, kv_head, head, column, begin, count, num_q, num_heads,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue the loads: k and v once, then q, dout, lse and delta of 64 queries at a time."""
    kv_full, q_full, q_empty, g_full, g_empty, _sum_full = bars
    PER_BLOCK: gl.constexpr = BLOCK // ROWS
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BOX: gl.constexpr = q_desc.layout
    q_box = reinterpret(q_smem, q_smem.dtype, [STAGES, 1, ROWS, 1, HEAD_DIM], BOX)
    g_box = reinterpret(g_smem, q_smem.dtype, [STAGES, 1, ROWS, 1, HEAD_DIM], BOX)
    k_box = reinterpret(k_smem, q_smem.dtype, [2, 1, ROWS, 1, HEAD_DIM], BOX)
    v_box = reinterpret(v_smem, q_smem.dtype, [2, 1, ROWS, 1, HEAD_DIM], BOX)
    if count > 0:
        mbarrier.expect(kv_full, 2 * PER_BLOCK * k_desc.block_type.nbytes)
        for i in gl.static_range(PER_BLOCK):
            at = [batch, column * BLOCK + i * ROWS, kv_head, 0]
            tma_load(k_desc, at, kv_full, k_box.index(i))
            tma_load(v_desc, at, kv_full, v_box.index(i))
    step = 0
    block = gl.load(row_ptr + begin, mask=count > 0, other=0)
    for entry in range(count):
        after = gl.load(row_ptr + begin + entry + 1, mask=entry + 1 < count, other=0)
        for inner in range(HEADS * PER_BLOCK):
            member = head + inner // PER_BLOCK
            row = block * BLOCK + inner % PER_BLOCK * ROWS
            stage = _stage(step, PER_BLOCK, STAGES)
            free = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(q_empty.index(stage), free)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, row, member, 0], q_full.index(stage), q_box.index(stage))
            mbarrier.wait(g_empty.index(stage), free)
            mbarrier.expect(g_full.index(stage), g_desc.block_type.nbytes)
            tma_load(g_desc, [batch, row, member, 0], g_full.index(stage), g_box.index(stage))
            at = row + gl.arange(0, ROWS, LANES)
            flat = (batch.to(gl.int64) * num_heads + member) * num_q + at
            exists = at < num_q
            async_load(lse_smem.index(stage), lse_ptr + flat, mask=exists)
            async_load(delta_smem.index(stage), delta_ptr + flat, mask=exists)
            async_copy.mbarrier_arrive(g_full.index(stage), increment_count=False)
            step += 1
        block = after


@gluon.jit
def _store_rows(ptr, buffer, values, stride):
    """Store 64 rows of values by way of shared memory."""
    DIM: gl.constexpr = values.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    buffer.store(values.to(buffer.dtype))
    thread_barrier()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)).to(gl.int64)
    col = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    gl.store(ptr + row[:, None] * stride + col[None, :], buffer.load(LAYOUT))


@gluon.jit
def _store_sums(
    dk_ptr, dv_ptr, part_ptr, k_tile, v_tile, dk, dv, scale, stride, part, HALF: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Store the gradients, or what another kernel adds to the sums of other programs."""
    DIM: gl.constexpr = dk.shape[1]
    LAYOUT: gl.constexpr = dk.type.layout
    if part < 0:
        # k and v are no longer needed: their buffers turn the rows around for wide stores.
        _store_rows(dk_ptr, k_tile, dk * scale, stride)
        _store_rows(dv_ptr, v_tile, dv, stride)
    else:
        row = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        col = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
        sums = part_ptr + part.to(gl.int64) * (2 * BLOCK * DIM)
        sums = sums + row[:, None] * DIM + col[None, :]
        gl.store(sums, dk)
        gl.store(sums + BLOCK * DIM, dv)


@gluon.jit
def _compute_partition(
    dk_ptr, dv_ptr, part_ptr, row_ptr,
    q_smem, g_smem, k_smem, v_smem, lse_smem, delta_smem,
    bars,
    valid, batch, kv_head, column, begin, count, masked, part,
    scale,
    stride_dkb, stride_dkt, stride_dkh,
    num_q, num_k,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 keys, transposed scores, and four products per step."""
    kv_full, q_full, q_empty, g_full, g_empty, sum_full = bars
    dtype: gl.constexpr = q_smem.dtype
    PER_BLOCK: gl.constexpr = BLOCK // ROWS
    HALF: gl.constexpr = INDEX if PER_BLOCK == 2 else 0
    APART: gl.constexpr = 1 if PER_BLOCK == 2 else 2  # from one of its steps to the next
    FIRST: gl.constexpr = 0 if PER_BLOCK == 2 else INDEX
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, KV_LAYOUT, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    key_first = column * BLOCK + HALF * ROWS
    k_tile = k_smem.index(HALF)
    v_tile = v_smem.index(HALF)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, KV_LAYOUT)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, KV_LAYOUT)
    zero = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
    ds_half = gl.convert_layout(zero.to(dtype), P_LAYOUT)
    scale_log2 = scale * LOG2E
    turns = (count * (HEADS * PER_BLOCK) + APART - 1 - FIRST) // APART
    masked_steps = masked * (HEADS * PER_BLOCK)
    k_held = k_tile
    v_held = v_tile
    if HELD:
        zero_tile = gl.zeros([ROWS, HEAD_DIM], dtype, gl.DotOperandLayout(0, S_LAYOUT, 2))
        k_held = zero_tile
        v_held = zero_tile
    if count > 0:
        mbarrier.wait(kv_full, 0)
        if HELD:
            k_held = k_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            v_held = v_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    for turn in range(turns):
        # A product of registers may not be in flight from one turn to the next: the assembler would
        # wait after every instruction.  So dk comes a turn late; the first time, zeros are added.
        step = turn * APART + FIRST
        stage = _stage(step, PER_BLOCK, STAGES)
        before = _stage(gl.maximum(step - APART, FIRST), PER_BLOCK, STAGES)
        mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
        dk_token = warpgroup_mma(ds_half, q_smem.index(before), dk, is_async=True)
        s_token = warpgroup_mma(
            k_held, q_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(g_full.index(stage), (step // STAGES) & 1)
        dp_token = warpgroup_mma(
            v_held, g_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        lse = lse_smem.index(stage).load(COL_LAYOUT) * LOG2E
        dk, ds_half, s = warpgroup_mma_wait(1, deps=[dk_token, ds_half, s_token])
        if turn > 0:
            mbarrier.arrive(q_empty.index(before), count=1)
        p = gl.exp2(s * scale_log2 - lse[None, :])  # [keys, queries]
        if CAUSAL:  # noqa: SIM102 (known when compiled)
            if step < masked_steps:
                block = gl.load(row_ptr + begin + step // (HEADS * PER_BLOCK))
                row = block * BLOCK + step % PER_BLOCK * ROWS + gl.arange(0, ROWS, COL_LAYOUT)
                key = key_first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
                seen = key[:, None] <= (row + num_k - num_q)[None, :]
                p = gl.where(seen, p, 0.0)
        p_half = gl.convert_layout(p.to(dtype), P_LAYOUT)
        dv_token = warpgroup_mma(p_half, g_smem.index(stage), dv, is_async=True)
        delta = delta_smem.index(stage).load(COL_LAYOUT)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        ds_half = gl.convert_layout((p * (dp - delta[None, :])).to(dtype), P_LAYOUT)
        dv, p_half, ds_half = warpgroup_mma_wait(0, deps=[dv_token, p_half, ds_half])
        mbarrier.arrive(g_empty.index(stage), count=1)
    if turns > 0:
        last = _stage((turns - 1) * APART + FIRST, PER_BLOCK, STAGES)
        dk = warpgroup_mma(ds_half, q_smem.index(last), dk)
    base = batch.to(gl.int64) * stride_dkb + kv_head.to(gl.int64) * stride_dkh
    base += key_first.to(gl.int64) * stride_dkt
    if PER_BLOCK == 2:
        if valid:
            _store_sums(
                dk_ptr + base, dv_ptr + base, part_ptr, k_tile, v_tile, dk, dv, scale, stride_dkt,
                part, HALF, BLOCK,
            )  # fmt: skip
    else:
        # The second warpgroup hands its sums to the first in the buffers that it alone has used.
        gl.static_assert(STAGES == 4)
        SUM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], gl.float32)
        dk_sum = reinterpret(q_smem, gl.float32, [2, ROWS, HEAD_DIM], SUM).index(1)
        dv_sum = reinterpret(g_smem, gl.float32, [2, ROWS, HEAD_DIM], SUM).index(1)
        if INDEX == 1:
            dk_sum.store(dk)
            dv_sum.store(dv)
            mbarrier.arrive(sum_full, count=1)
        else:
            mbarrier.wait(sum_full, 0)
            dk += dk_sum.load(KV_LAYOUT)
            dv += dv_sum.load(KV_LAYOUT)
            if valid:
                _store_sums(
                    dk_ptr + base, dv_ptr + base, part_ptr, k_tile, v_tile, dk, dv, scale,
                    stride_dkt, part, 0, BLOCK,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["num_slots", "num_parts"])
def block_sparse_hopper_dkdv_kernel(
    dk_ptr, dv_ptr, part_ptr, q_desc, g_desc, k_desc, v_desc, lse_ptr, delta_ptr, ccol_ptr, row_ptr,
    ends_ptr, columns_ptr,
    scale,
    stride_dkb, stride_dkt, stride_dkh,
    num_q, num_k, num_heads, num_cols, num_patterns, num_slots, num_parts, pattern_heads,
    pattern_kv_heads,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Grid: one program per slot of the plan, KV head of its pattern and sequence.

    ``*_desc`` describe q, dout, k and v in boxes of 64 tokens of one head.  ``HEADS`` heads of a
    group share a pattern.  ``dk`` and ``dv`` share their strides.  ``num_k`` is a multiple of
    ``BLOCK``.  Sums of a part of a list go to ``part [parts, dk or dv, BLOCK, D]``.
    """
    dtype: gl.constexpr = q_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    PER_BLOCK: gl.constexpr = BLOCK // ROWS
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], WIDE)
    g_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], WIDE)
    k_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], WIDE)
    v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], WIDE)
    ROW_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], ROW_LAYOUT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], ROW_LAYOUT)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_full, q_empty = ring_barriers(STAGES, 1, PER_BLOCK)
    g_full, g_empty = ring_barriers(STAGES, 33, PER_BLOCK)
    mbarrier.init(kv_full, count=1)
    sum_full = kv_full  # unused
    if PER_BLOCK == 1:
        sum_full = gl.allocate_shared_memory(gl.int64, [1], bar)
        mbarrier.init(sum_full, count=1)
    bars = (kv_full, q_full, q_empty, g_full, g_empty, sum_full)
    valid, batch, head, column, begin, count, masked, part = _place(
        ccol_ptr, row_ptr, ends_ptr, columns_ptr, num_q, num_k, num_cols, num_patterns, num_slots,
        num_parts, pattern_heads, pattern_kv_heads, GROUP, CAUSAL, BLOCK,
    )  # fmt: skip
    kv_head = head // GROUP
    # Sums over warps passed through shared memory that the fork below writes again.
    thread_barrier()
    gl.warp_specialize(
        [
            (_compute_partition, (
                dk_ptr, dv_ptr, part_ptr, row_ptr, q_smem, g_smem, k_smem, v_smem, lse_smem,
                delta_smem, bars, valid, batch, kv_head, column, begin, count, masked, part,
                scale, stride_dkb, stride_dkt, stride_dkh, num_q, num_k, HEADS, HEAD_DIM,
                CAUSAL, BLOCK, STAGES, HELD, 0,
            )),
            (_compute_partition, (
                dk_ptr, dv_ptr, part_ptr, row_ptr, q_smem, g_smem, k_smem, v_smem, lse_smem,
                delta_smem, bars, valid, batch, kv_head, column, begin, count, masked, part,
                scale, stride_dkb, stride_dkt, stride_dkh, num_q, num_k, HEADS, HEAD_DIM,
                CAUSAL, BLOCK, STAGES, HELD, 1,
            )),
            (_load_partition, (
                q_desc, g_desc, k_desc, v_desc, lse_ptr, delta_ptr, row_ptr, q_smem, g_smem,
                k_smem, v_smem, lse_smem, delta_smem, bars, batch, kv_head, head, column,
                begin, count, num_q, num_heads, HEADS, HEAD_DIM, BLOCK, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

"""Backward of attention inside chosen blocks for Hopper (Gluon): parts of dq, dk and dv.

``bwd.py`` has the maths and defines the parts.  Four warps gather the rows of the
queries that chose a block, a tile ahead of two warpgroups that compute.  Each of these takes half
the rows of the scores ``[keys, rows]``, half the columns of dk and dv, and half the rows of dq, so
probabilities and their gradients pass through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import thread_barrier
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.selected.kernels.gather_sm90 import GATHER_WARPS, copy_rows
from sparsek_kernels.nsa.selected.kernels.items import SIZES, locate_item


@gluon.constexpr_function
def _row_layout(rows, cols, swaps):
    """An accumulator ``[rows, cols]`` whose four threads of a row swapped columns, once or twice.

    After two swaps, which are shuffles, a thread holds eight columns side by side.
    """
    apart = [8, 16 if swaps == 2 else 4]  # columns from one thread of a row to the others
    regs = [[0, x] for x in (1, 2, 4, 8, 16, 32, 64) if x < cols and x not in apart] + [[8, 0]]
    lanes = [[0, x] for x in apart] + [[1, 0], [2, 0], [4, 0]]
    warps = [[x, 0] for x in (16, 32, 64) if x < rows]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [rows, cols])


@gluon.jit
def _look_up(lse_ptr, delta_ptr, entries_ptr, stat_base, row, at, listed):
    """Lse, delta and slot of rows; those not listed get ``lse = inf`` and no slot."""
    lse = gl.load(lse_ptr + stat_base + row, mask=listed, other=float("inf"))
    delta = gl.load(delta_ptr + stat_base + row, mask=listed, other=0.0)
    return lse, delta, gl.load(entries_ptr + at, mask=listed, other=-1)


@gluon.jit
def _gather_partition(
    pointers, buffers, strides, batch, kv_head, entry, entry_end, num_q, num_kv_heads,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy rows of q and dout, their lse, delta, row and slot, ``ROWS`` at a time.

    Rows past the last entry repeat its first head, with ``lse = inf``.
    """
    q_ptr, dout_ptr, lse_ptr, delta_ptr, entries_ptr, entry_rows_ptr = pointers
    q_smem, dout_smem, lse_smem, delta_smem, row_smem, slot_smem, full, empty = buffers
    octet_gb, octet_gt, octet_gh, octet_qb, octet_qt, octet_qh = strides
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [GATHER_WARPS], [0])
    BLOCK_E: gl.constexpr = ROWS // BLOCK_G
    offs_r = gl.arange(0, ROWS, FLAT)
    member = offs_r % BLOCK_G
    batch = batch.to(gl.int64)
    q_base = q_ptr + batch * octet_qb * 8
    g_base = dout_ptr + batch * octet_gb * 8
    stat_base = (batch * num_kv_heads + kv_head) * GROUP * num_q
    stat_base += gl.minimum(member, GROUP - 1).to(gl.int64) * num_q
    some = entry < entry_end
    last = entry_end - 1
    head = member < GROUP
    at = entry + offs_r // BLOCK_G
    row = gl.load(entry_rows_ptr + gl.minimum(at, last), mask=some, other=0)
    # Look-ups run ahead of the copies: rows by two tiles, the rest by one.
    next_row = gl.load(entry_rows_ptr + gl.minimum(at + BLOCK_E, last), mask=some, other=0)
    lse, delta, slot = _look_up(
        lse_ptr, delta_ptr, entries_ptr, stat_base, row, at, (at < entry_end) & head
    )
    for step in range((entry_end - entry + BLOCK_E - 1) // BLOCK_E):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        row_smem.index(stage).store(row)
        lse = gl.where(lse == float("-inf"), float("inf"), lse)
        lse_smem.index(stage).store(lse * LOG2E)
        delta_smem.index(stage).store(delta)
        slot_smem.index(stage).store(slot)
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        at += BLOCK_E
        row = next_row
        next_row = gl.load(entry_rows_ptr + gl.minimum(at + BLOCK_E, last))
        lse, delta, slot = _look_up(
            lse_ptr, delta_ptr, entries_ptr, stat_base, row, at, (at < entry_end) & head
        )
        copy_rows(
            q_smem.index(stage), row_smem.index(stage), q_base, kv_head, octet_qt, octet_qh,
            GROUP, BLOCK_G, HEAD_DIM, ROWS,
        )  # fmt: skip
        copy_rows(
            dout_smem.index(stage), row_smem.index(stage), g_base, kv_head, octet_gt, octet_gh,
            GROUP, BLOCK_G, HEAD_DIM, ROWS,
        )  # fmt: skip
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _compute_partition(
    pointers, buffers,
    k_smem, v_smem, p_smem, ds_smem,
    strides, live, batch, kv_head, k_start, k_len, block, entry, entry_end, first_slot, near, shift,
    scale,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores ``[BLOCK_N, ROWS]``, their gradients, and the three products that follow from them."""
    dk_part_ptr, dv_part_ptr, dq_part_ptr, k_ptr, v_ptr = pointers
    q_smem, dout_smem, lse_smem, delta_smem, row_smem, slot_smem, full, empty = buffers
    octet_kb, octet_kt, octet_kh, octet_vb, octet_vt, octet_vh = strides
    dtype: gl.constexpr = q_smem.dtype
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [8, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD_DIM // 2, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    OUT_LAYOUT: gl.constexpr = _row_layout(ROWS, HEAD_DIM, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    BLOCK_E: gl.constexpr = ROWS // BLOCK_G
    steps = (entry_end - entry + BLOCK_E - 1) // BLOCK_E
    wide_head = kv_head.to(gl.int64)
    batch = batch.to(gl.int64)
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]
    load_key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    token = (k_start + load_key).to(gl.int64)[:, None]
    mask_k = (load_key < k_len)[:, None]
    k_base = k_ptr + (batch * octet_kb + wide_head * octet_kh) * 8
    k_smem.store(gl.load(k_base + token * octet_kt * 8 + col, mask=mask_k, other=0.0))
    v_base = v_ptr + (batch * octet_vb + wide_head * octet_vh) * 8
    v_smem.store(gl.load(v_base + token * octet_vt * 8 + col, mask=mask_k, other=0.0))
    fence_async_shared()
    thread_barrier()
    key_pos = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, S_LAYOUT))
    dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, KV_LAYOUT)
    dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, KV_LAYOUT)
    zero_s = gl.zeros([BLOCK_N, ROWS], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([ROWS, HEAD_DIM], gl.float32, DQ_LAYOUT)
    scale_log2 = scale * LOG2E
    out_member = gl.arange(0, ROWS, gl.SliceLayout(1, OUT_LAYOUT)) % BLOCK_G
    out_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT_LAYOUT))[None, :]
    for step in range(steps):
        stage = step % STAGES
        q, dout = q_smem.index(stage), dout_smem.index(stage)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        fence_async_shared()
        s_token = warpgroup_mma(
            k_smem, q.permute((1, 0)), zero_s, use_acc=False, is_async=True
        )  # [BLOCK_N, ROWS]
        dp_token = warpgroup_mma(v_smem, dout.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        lse = lse_smem.index(stage).load(COL_LAYOUT)
        delta = delta_smem.index(stage).load(COL_LAYOUT)
        s = warpgroup_mma_wait(1, deps=[s_token])
        p = gl.exp2(s * scale_log2 - lse[None, :])
        if step * BLOCK_E < near:
            pos = row_smem.index(stage).load(COL_LAYOUT) + shift
            seen = (key_pos[:, None] <= pos[None, :]) & (key_pos < k_len)[:, None]
            p = gl.where(seen, p, 0.0)
        p_smem.store(p.to(dtype))
        fence_async_shared()
        thread_barrier()
        dv_token = warpgroup_mma(p_smem, dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        ds_smem.store((p * (dp - delta[None, :])).to(dtype))
        fence_async_shared()
        thread_barrier()
        dq_token = warpgroup_mma(
            ds_smem.permute((1, 0)), k_smem, zero_q, use_acc=False, is_async=True
        )  # [ROWS, HEAD_DIM]
        dk_token = warpgroup_mma(ds_smem, q, dk, is_async=True)
        slot = slot_smem.index(stage).load(gl.SliceLayout(1, OUT_LAYOUT))
        dv, dq = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        part = gl.convert_layout(dq.to(dtype), _row_layout(ROWS, HEAD_DIM, 1))
        part = gl.convert_layout(part, OUT_LAYOUT)
        at = ((slot - first_slot).to(gl.int64) * GROUP + out_member)[:, None] * HEAD_DIM
        gl.store(
            dq_part_ptr + at + out_col,
            part,
            mask=(slot >= 0)[:, None],
            eviction_policy="evict_first",
        )
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        # Both warpgroups are done with this stage, with p and with ds.
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    if live:
        offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, KV_LAYOUT))
        item_row = (gl.program_id(0).to(gl.int64) * BLOCK_N + offs_n)[:, None] * HEAD_DIM
        out_at = item_row + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, KV_LAYOUT))[None, :]
        gl.store(dk_part_ptr + out_at, dk * scale)
        gl.store(dv_part_ptr + out_at, dv)


@gluon.jit(do_not_specialize=SIZES)
def nsa_selected_hopper_bwd_part_kernel(
    dk_part_ptr, dv_part_ptr, dq_part_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,
    item_keys_ptr, entries_ptr, entry_rows_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr,
    scale,
    octet_gb, octet_gt, octet_gh,
    octet_qb, octet_qt, octet_qh,
    octet_kb, octet_kt, octet_kh,
    octet_vb, octet_vt, octet_vh,
    first_key, num_keys, first_slot, num_blocks, num_kv_heads, num_q, num_k, offset, item_entries,
    Q_LAYOUT: gl.constexpr, K_LAYOUT: gl.constexpr, DS_LAYOUT: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, SEL_BLOCK: gl.constexpr, VARLEN: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: up to ``item_entries`` queries that chose one block of ``SEL_BLOCK`` keys.

    Strides count groups of eight elements.  Results as of
    ``nsa_selected_bwd_part_kernel``.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    live, kv_head, batch, k_start, k_len, block, begin, entry, entry_end, shift = locate_item(
        item_keys_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr, first_key, num_keys,
        num_blocks, num_kv_heads, offset, num_k, item_entries, SEL_BLOCK, VARLEN,
    )  # fmt: skip
    entry_end = gl.where(live, entry_end, entry)
    # Rows ascend: those that do not see the whole block, because they lie in it, come first.
    near = begin + SEL_BLOCK - entry
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], Q_LAYOUT)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, HEAD_DIM], K_LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, HEAD_DIM], K_LAYOUT)
    p_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, ROWS], DS_LAYOUT)
    ds_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, ROWS], DS_LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    row_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    slot_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    full, empty = ring_barriers(STAGES, 32 * GATHER_WARPS + 1, 1)
    buffers = (q_smem, dout_smem, lse_smem, delta_smem, row_smem, slot_smem, full, empty)
    gl.warp_specialize(
        [
            (_compute_partition, (
                (dk_part_ptr, dv_part_ptr, dq_part_ptr, k_ptr, v_ptr), buffers, k_smem, v_smem,
                p_smem, ds_smem, (octet_kb, octet_kt, octet_kh, octet_vb, octet_vt, octet_vh),
                live, batch, kv_head, k_start, k_len, block, entry, entry_end, first_slot, near,
                shift, scale, GROUP, BLOCK_G, HEAD_DIM, ROWS, SEL_BLOCK, STAGES,
            )),
            (_gather_partition, (
                (q_ptr, dout_ptr, lse_ptr, delta_ptr, entries_ptr, entry_rows_ptr), buffers,
                (octet_gb, octet_gt, octet_gh, octet_qb, octet_qt, octet_qh), batch, kv_head,
                entry, entry_end, num_q, num_kv_heads, GROUP, BLOCK_G, HEAD_DIM, ROWS, STAGES,
            )),
        ],
        [GATHER_WARPS], [56],
    )  # fmt: skip

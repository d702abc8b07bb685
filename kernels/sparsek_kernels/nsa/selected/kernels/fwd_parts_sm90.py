"""Parts of selected attention on Hopper (Gluon), as ``fwd_parts.py`` defines them.

Four warps gather the rows of the queries that chose a block, some tiles ahead of a warpgroup that
computes; two programs share a multiprocessor.
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


@gluon.jit
def _gather_partition(
    q_ptr, entries_ptr, entry_rows_ptr,
    buffers,
    row_smem,
    octet_qb, octet_qt, octet_qh,
    batch, kv_head, entry, entry_end,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy rows of q and their slots, ``ROWS`` at a time; rows past the last entry repeat it."""
    q_smem, slot_smem, full, empty = buffers
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [GATHER_WARPS], [0])
    BLOCK_E: gl.constexpr = ROWS // BLOCK_G
    offs_r = gl.arange(0, ROWS, FLAT)
    q_base = q_ptr + batch.to(gl.int64) * octet_qb * 8
    last = entry_end - 1
    at = entry + offs_r // BLOCK_G
    row = gl.load(entry_rows_ptr + gl.minimum(at, last), mask=entry < entry_end, other=0)
    for step in range((entry_end - entry + BLOCK_E - 1) // BLOCK_E):
        stage = step % STAGES
        listed = (at < entry_end) & (offs_r % BLOCK_G < GROUP)
        slot = gl.load(entries_ptr + at, mask=listed, other=-1)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        row_smem.store(row)
        thread_barrier()
        copy_rows(
            q_smem.index(stage), row_smem, q_base, kv_head, octet_qt, octet_qh,
            GROUP, BLOCK_G, HEAD_DIM, ROWS,
        )  # fmt: skip
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        at += BLOCK_E
        row = gl.load(entry_rows_ptr + gl.minimum(at, last))
        slot_smem.index(stage).store(slot)
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _compute_partition(
    part_ptr, part_lse_ptr, k_ptr, v_ptr,
    buffers,
    k_smem, v_smem,
    strides, batch, kv_head, first_token, entry, entry_end, first_slot, scale,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax over one block of ``BLOCK_N`` keys for ``ROWS`` rows at a time."""
    q_smem, slot_smem, full, empty = buffers
    octet_kb, octet_kt, octet_kh, octet_vb, octet_vt, octet_vh = strides
    dtype: gl.constexpr = q_smem.dtype
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    BLOCK_E: gl.constexpr = ROWS // BLOCK_G
    steps = (entry_end - entry + BLOCK_E - 1) // BLOCK_E
    wide_head = kv_head.to(gl.int64)
    batch = batch.to(gl.int64)
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]
    key = first_token + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    token = key.to(gl.int64)[:, None]
    out_member = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)) % BLOCK_G
    row_member = gl.arange(0, ROWS, ROW_LAYOUT) % BLOCK_G
    scale_log2 = scale * LOG2E
    zero_s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    zero_o = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    if steps > 0:
        # A block without near queries is whole.
        k_base = k_ptr + (batch * octet_kb + wide_head * octet_kh) * 8
        v_base = v_ptr + (batch * octet_vb + wide_head * octet_vh) * 8
        k = gl.load(k_base + token * octet_kt * 8 + col)
        v = gl.load(v_base + token * octet_vt * 8 + col)
        k_smem.store(k)
        v_smem.store(v)
        fence_async_shared()
        thread_barrier()
    for step in range(steps):
        stage = step % STAGES
        q = q_smem.index(stage)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        fence_async_shared()
        s = warpgroup_mma(q, k_smem.permute((1, 0)), zero_s, use_acc=False)  # [ROWS, BLOCK_N]
        m = gl.max(s, 1) * scale_log2  # [ROWS]
        p = gl.exp2(s * scale_log2 - m[:, None])
        p_half = gl.convert_layout(p.to(dtype), P_LAYOUT)
        o_token = warpgroup_mma(p_half, v_smem, zero_o, use_acc=False, is_async=True)
        denom = gl.sum(p, 1)  # [ROWS]
        slot = slot_smem.index(stage).load(ROW_LAYOUT)
        stat = (slot - first_slot).to(gl.int64) * GROUP + row_member
        gl.store(part_lse_ptr + stat, m + gl.log2(denom), mask=slot >= 0)
        o, p_half = warpgroup_mma_wait(0, deps=[o_token, p_half])
        o *= gl.convert_layout(1.0 / denom, gl.SliceLayout(1, O_LAYOUT))[:, None]
        # The rows of q are no longer needed: their buffer turns the output around for wide stores.
        q.store(o.to(dtype))
        thread_barrier()
        part = q.load(WIDE)
        out_slot = slot_smem.index(stage).load(gl.SliceLayout(1, WIDE))
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        at = ((out_slot - first_slot).to(gl.int64) * GROUP + out_member)[:, None] * HEAD_DIM
        gl.store(
            part_ptr + at + col, part, mask=(out_slot >= 0)[:, None], eviction_policy="evict_first"
        )


@gluon.jit(do_not_specialize=SIZES)
def nsa_selected_hopper_part_kernel(
    part_ptr, part_lse_ptr, q_ptr, k_ptr, v_ptr, item_keys_ptr, entries_ptr, entry_rows_ptr,
    entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr,
    scale,
    octet_qb, octet_qt, octet_qh,
    octet_kb, octet_kt, octet_kh,
    octet_vb, octet_vt, octet_vh,
    first_key, num_keys, first_slot, num_blocks, num_kv_heads, num_q, num_k, offset, item_entries,
    Q_LAYOUT: gl.constexpr, K_LAYOUT: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    SEL_BLOCK: gl.constexpr, VARLEN: gl.constexpr, ROWS: gl.constexpr, BLOCK_G: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program: up to ``item_entries`` queries that chose one block of ``SEL_BLOCK`` keys.

    Strides count groups of eight elements.  Results as of ``nsa_selected_part_kernel``.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    live, kv_head, batch, k_start, _k_len, block, _begin, entry, entry_end, _shift = locate_item(
        item_keys_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr, first_key, num_keys,
        num_blocks, num_kv_heads, offset, num_k, item_entries, SEL_BLOCK, VARLEN,
    )  # fmt: skip
    entry_end = gl.where(live, entry_end, entry)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, HEAD_DIM], K_LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, HEAD_DIM], K_LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slot_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    row_smem = gl.allocate_shared_memory(gl.int32, [ROWS], FLAT)
    full, empty = ring_barriers(STAGES, 32 * GATHER_WARPS + 1, 1)
    buffers = (q_smem, slot_smem, full, empty)
    gl.warp_specialize(
        [
            (_compute_partition, (
                part_ptr, part_lse_ptr, k_ptr, v_ptr, buffers, k_smem, v_smem,
                (octet_kb, octet_kt, octet_kh, octet_vb, octet_vt, octet_vh), batch, kv_head,
                k_start + block * SEL_BLOCK, entry, entry_end, first_slot, scale,
                GROUP, BLOCK_G, HEAD_DIM, ROWS, SEL_BLOCK, STAGES,
            )),
            (_gather_partition, (
                q_ptr, entries_ptr, entry_rows_ptr, buffers, row_smem, octet_qb, octet_qt,
                octet_qh, batch, kv_head, entry, entry_end, GROUP, BLOCK_G, HEAD_DIM, ROWS,
                STAGES,
            )),
        ],
        [GATHER_WARPS], [40],
    )  # fmt: skip

"""Parts of selected attention on Hopper (Gluon) with bulk copies (TMA).

``fwd_parts.py`` defines the parts.  The heads of a KV group are one box of q for each entry (a
query that chose a block), and one box of the parts.  One warp copies boxes into a ring of tiles and
out of it.  Two warpgroups take turns: each replaces a tile of queries by the tile of their outputs.
"""

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
from sparsek_kernels.common.kernels.gluon_names import (
    reinterpret,
    thread_barrier,
    tma_load,
    tma_store,
)
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.selected.kernels.items import SIZES, locate_item

COLS: gl.constexpr = gl.constexpr(64)  # of a box: 128 bytes, the width of a swizzle
WARPGROUPS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def _load_listed(values_ptr, entry, tile, entry_end, BLOCK_E: gl.constexpr):
    """Values ``[BLOCK_E]`` of a tile's entries, all in every thread; past the end, the last."""
    EACH: gl.constexpr = gl.BlockedLayout([BLOCK_E], [32], [1], [0])
    at = entry + tile * BLOCK_E + gl.arange(0, BLOCK_E, EACH)
    return gl.load(values_ptr + gl.minimum(at, entry_end - 1))


@gluon.jit
def _pick(values, INDEX: gl.constexpr):
    """``values[INDEX]`` as a scalar."""
    offs = gl.arange(0, values.shape[0], values.type.layout)
    return gl.sum(gl.where(offs == INDEX, values, 0), 0)


@gluon.jit
def _load_tile(
    q_desc, rows, boxes, full, stage, batch, head, HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr
):
    """Start the copies of the q of a tile's entries, which are rows ``rows [BLOCK_E]``."""
    HALVES: gl.constexpr = HEAD_DIM // COLS
    barrier = full.index(stage)
    mbarrier.expect(barrier, HALVES * BLOCK_E * q_desc.block_type.nbytes)
    for e in gl.static_range(BLOCK_E):
        row = _pick(rows, e)
        for half in gl.static_range(HALVES):
            box = boxes.index((stage * HALVES + half) * BLOCK_E + e)
            tma_load(q_desc, [batch, row, head, half * COLS], barrier, box)


@gluon.jit
def _store_tile(
    part_desc, slots, boxes, stage, count, HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr
):
    """Store the first ``count`` parts of a tile and wait until its memory may be overwritten."""
    HALVES: gl.constexpr = HEAD_DIM // COLS
    for e in gl.static_range(BLOCK_E):
        slot = _pick(slots, e)
        if e < count:
            for half in gl.static_range(HALVES):
                box = boxes.index((stage * HALVES + half) * BLOCK_E + e)
                tma_store(part_desc, [0, slot, 0, half * COLS], box)
    tma.store_wait(0)


@gluon.jit
def _copy_partition(
    values,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load k, v and the first tiles; then store each tile that is done and load another there."""
    (
        part_desc, q_desc, k_desc, v_desc, entries_ptr, entry_rows_ptr, tile_smem, k_smem, v_smem,
        bars, batch, kv_head, first_token, entry, entry_end, first_slot,
    ) = values  # fmt: skip
    kv_full, full, done = bars
    dtype: gl.constexpr = tile_smem.dtype
    BOX_LAYOUT: gl.constexpr = q_desc.layout
    BLOCK_E: gl.constexpr = ROWS // GROUP
    # In a tile's memory, all rows of the first 64 columns come before all rows of the next 64.
    BOXES: gl.constexpr = STAGES * (HEAD_DIM // COLS) * BLOCK_E
    boxes = reinterpret(tile_smem, dtype, [BOXES, 1, 1, GROUP, COLS], BOX_LAYOUT)
    steps = (entry_end - entry + BLOCK_E - 1) // BLOCK_E
    head = kv_head * GROUP
    if steps > 0:
        key_box: gl.constexpr = [1, BLOCK_N, 1, HEAD_DIM]
        k_box = reinterpret(k_smem, dtype, key_box, BOX_LAYOUT)
        v_box = reinterpret(v_smem, dtype, key_box, BOX_LAYOUT)
        mbarrier.expect(kv_full, 2 * k_desc.block_type.nbytes)
        tma_load(k_desc, [batch, first_token, kv_head, 0], kv_full, k_box)
        tma_load(v_desc, [batch, first_token, kv_head, 0], kv_full, v_box)
        for step in range(gl.minimum(steps, STAGES)):
            rows = _load_listed(entry_rows_ptr, entry, step, entry_end, BLOCK_E)
            _load_tile(q_desc, rows, boxes, full, step, batch, head, HEAD_DIM, BLOCK_E)
        for step in range(steps):
            stage = step % STAGES
            # Wanted only after the wait, which hides how long they take.
            slots = _load_listed(entries_ptr, entry, step, entry_end, BLOCK_E)
            rows = _load_listed(entry_rows_ptr, entry, step + STAGES, entry_end, BLOCK_E)
            mbarrier.wait(done.index(stage), (step // STAGES) & 1)
            _store_tile(
                part_desc, slots - first_slot, boxes, stage, entry_end - entry - step * BLOCK_E,
                HEAD_DIM, BLOCK_E,
            )  # fmt: skip
            if step + STAGES < steps:
                _load_tile(q_desc, rows, boxes, full, stage, batch, head, HEAD_DIM, BLOCK_E)


@gluon.jit
def _compute_partition(
    values,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Softmax over one block of ``BLOCK_N`` keys for every second tile of ``ROWS`` rows."""
    (
        part_lse_ptr, entries_ptr, tile_smem, k_smem, v_smem, bars, entry, entry_end, first_slot,
        scale,
    ) = values  # fmt: skip
    kv_full, full, done = bars
    dtype: gl.constexpr = tile_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    BLOCK_E: gl.constexpr = ROWS // GROUP
    HALVES: gl.constexpr = HEAD_DIM // COLS
    # Both halves of the output at once would not fit into the registers.
    v_halves = reinterpret(v_smem, dtype, [HALVES, BLOCK_N, COLS], v_smem.layout)
    out_halves = reinterpret(tile_smem, dtype, [STAGES * HALVES, ROWS, COLS], tile_smem.layout)
    steps = (entry_end - entry + BLOCK_E - 1) // BLOCK_E
    offs_r = gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    scale_log2 = scale * LOG2E
    zero_s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    zero_o = gl.zeros([ROWS, COLS], gl.float32, O_LAYOUT)
    if steps > 0:
        mbarrier.wait(kv_full, 0)
    for step in range(INDEX, steps, WARPGROUPS):
        stage = step % STAGES
        at = entry + step * BLOCK_E + offs_r // GROUP
        slot = gl.load(entries_ptr + at, mask=at < entry_end, other=-1)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        s = warpgroup_mma(
            tile_smem.index(stage), k_smem.permute((1, 0)), zero_s, use_acc=False
        )  # [ROWS, BLOCK_N]
        m = gl.max(s, 1) * scale_log2  # [ROWS]
        p = gl.exp2(s * scale_log2 - m[:, None])
        p_half = gl.convert_layout(p.to(dtype), P_LAYOUT)
        o_token = warpgroup_mma(p_half, v_halves.index(0), zero_o, use_acc=False, is_async=True)
        denom = gl.sum(p, 1)  # [ROWS]
        stat = (slot - first_slot).to(gl.int64) * GROUP + offs_r % GROUP
        gl.store(part_lse_ptr + stat, m + gl.log2(denom), mask=slot >= 0)
        inverse = gl.convert_layout(1.0 / denom, gl.SliceLayout(1, O_LAYOUT))[:, None]
        for half in gl.static_range(HALVES):
            o, p_half = warpgroup_mma_wait(0, deps=[o_token, p_half])
            # The rows of q are no longer needed: the output takes their place.
            out_halves.index(stage * HALVES + half).store((o * inverse).to(dtype))
            if half + 1 < HALVES:
                o_token = warpgroup_mma(
                    p_half, v_halves.index(half + 1), zero_o, use_acc=False, is_async=True
                )
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(done.index(stage), count=1)


@gluon.jit(do_not_specialize=SIZES)
def nsa_selected_hopper_tma_part_kernel(
    part_desc, part_lse_ptr, q_desc, k_desc, v_desc, item_keys_ptr, entries_ptr, entry_rows_ptr,
    entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr,
    scale, first_key, num_keys, first_slot, num_blocks, num_kv_heads, num_q, num_k, offset,
    item_entries,
    Q_LAYOUT: gl.constexpr, K_LAYOUT: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    SEL_BLOCK: gl.constexpr, VARLEN: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: up to ``item_entries`` queries that chose one block of ``SEL_BLOCK`` keys.

    Descriptors are of q, k and v ``[B, N, H, D]`` and of ``part [1, slots, GROUP, D]``.  Results
    as of ``nsa_selected_part_kernel``.
    """
    dtype: gl.constexpr = q_desc.dtype
    live, kv_head, batch, k_start, _k_len, block, _begin, entry, entry_end, _shift = locate_item(
        item_keys_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr, first_key, num_keys,
        num_blocks, num_kv_heads, offset, num_k, item_entries, SEL_BLOCK, VARLEN,
    )  # fmt: skip
    entry_end = gl.where(live, entry_end, entry)
    tile_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, HEAD_DIM], K_LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [SEL_BLOCK, HEAD_DIM], K_LAYOUT)
    # A warpgroup's tiles must lie where only its own lie, or one phase would pass for the other.
    gl.static_assert(STAGES % WARPGROUPS == 0)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    full, done = ring_barriers(STAGES, 1, 1)
    mbarrier.init(kv_full, count=1)
    bars = (kv_full, full, done)
    compute = (
        part_lse_ptr, entries_ptr, tile_smem, k_smem, v_smem, bars, entry, entry_end, first_slot,
        scale,
    )  # fmt: skip
    copy = (
        part_desc, q_desc, k_desc, v_desc, entries_ptr, entry_rows_ptr, tile_smem, k_smem, v_smem,
        bars, batch, kv_head, k_start + block * SEL_BLOCK, entry, entry_end, first_slot,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute_partition, (compute, GROUP, HEAD_DIM, ROWS, SEL_BLOCK, STAGES, 0)),
            (_compute_partition, (compute, GROUP, HEAD_DIM, ROWS, SEL_BLOCK, STAGES, 1)),
            (_copy_partition, (copy, GROUP, HEAD_DIM, ROWS, SEL_BLOCK, STAGES)),
        ],
        [4, 1],
        [96, 48],
    )

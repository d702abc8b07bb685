"""Selected attention from its parts on Hopper (Gluon), token-major.

``fwd_combine.py`` has the maths.  A tile of tokens needs its queries, the keys and values of its
near blocks, its parts and the outputs of the other branches.  All but the queries pass through one
ring of buffers of one size.  Four warps copy them ahead of a warpgroup that computes, across the
tiles that a program serves; two programs share a multiprocessor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier
from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.common.kernels.softmax_sm90 import softmax_step
from sparsek_kernels.nsa.selected.kernels.fwd_combine import ROW_SIZES, is_near
from sparsek_kernels.nsa.selected.kernels.fwd_combine_load_sm90 import (
    COPY_WARPS,
    copy_partition,
    first_place,
    is_far,
    near_steps,
    step_block,
    tile_blocks,
    tile_place,
)


@gluon.jit
def _take(ring, bars, count, STAGES: gl.constexpr):
    """The next buffer, once it is full."""
    stage = count % STAGES
    mbarrier.wait(bars[0].index(stage), (count // STAGES) & 1)
    return ring.index(stage)


@gluon.jit
def _give_back(bars, count, STAGES: gl.constexpr, HELD_BACK: gl.constexpr = False):
    """Leave buffer number ``count`` to the copies, once all warps are done with it.

    ``HELD_BACK`` keeps bulk copies from overtaking what was loaded from it into registers.
    """
    if HELD_BACK:
        fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars[1].index(count % STAGES), count=1)


@gluon.jit
def _compute_partition(
    pointers, ring,
    bars,
    queries,
    weight_smem,
    sizes, maps, shared, num_items, scale,
    GROUP: gl.constexpr, BLOCK_G: gl.constexpr, TOP_N: gl.constexpr, BLOCK_S: gl.constexpr,
    SEL_BLOCK: gl.constexpr, MAPPED: gl.constexpr, VARLEN: gl.constexpr, GATED: gl.constexpr,
    SHARED: gl.constexpr, MOST: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax over near and shared blocks, then the weighted sum of everything that is left."""
    out_ptr, lse_ptr, part_lse_ptr, gate_cmp_ptr, gate_slc_ptr, gate_swa_ptr, indices_ptr = pointers
    first_row, _num_rows, num_q, _num_k, _offset, num_kv_heads, _num_tiles = sizes
    dtype: gl.constexpr = ring.dtype
    ROWS: gl.constexpr = ring.shape[1]
    BLOCK_T: gl.constexpr = ROWS // BLOCK_G
    HEAD_DIM: gl.constexpr = ring.shape[2]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    LIST: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEL_BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    LIST_ROW: gl.constexpr = gl.SliceLayout(1, LIST)
    offs_l = gl.arange(0, ROWS, LIST_ROW)
    offs_s = gl.arange(0, BLOCK_S, gl.SliceLayout(0, LIST))
    offs_r = gl.arange(0, ROWS, S_ROW)
    offs_o = gl.arange(0, ROWS, O_ROW)
    offs_w = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    offs_n = gl.arange(0, SEL_BLOCK, gl.SliceLayout(0, S_LAYOUT))
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]
    zero_s = gl.zeros([ROWS, SEL_BLOCK], gl.float32, S_LAYOUT)
    scale_log2 = scale * LOG2E
    heads = num_kv_heads * GROUP
    weight_table = reinterpret(
        weight_smem, gl.float32, [BLOCK_S, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    q_smem, q_full, q_empty = queries
    count = 0
    turn = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        live, kv_head, _batch, start, end, _base_row, _k_start, _k_len, shift = tile_place(
            index, sizes, maps, MAPPED, VARLEN, BLOCK_T
        )
        if live:
            row = start + offs_l // BLOCK_G
            member = offs_l % BLOCK_G
            choice = (row.to(gl.int64) * num_kv_heads + kv_head) * TOP_N
            listed = gl.load(
                indices_ptr + choice[:, None] + offs_s[None, :],
                mask=((row < end) & (member < GROUP))[:, None] & (offs_s < TOP_N)[None, :],
                other=-1,
            )  # [ROWS, BLOCK_S]
            slot = ((row - first_row).to(gl.int64) * num_kv_heads + kv_head) * TOP_N
            if SHARED:
                bits = gl.load(
                    shared[0] + row.to(gl.int64) * num_kv_heads + kv_head,
                    mask=(row < end) & (member < GROUP),
                    other=0,
                )
                far = ((bits[:, None] >> offs_s[None, :]) & 1) != 0
            else:
                far = is_far(listed, ((row + shift) // SEL_BLOCK)[:, None])
            far_lse = gl.load(
                part_lse_ptr + (slot[:, None] + offs_s[None, :]) * GROUP + member[:, None],
                mask=far,
                other=float("-inf"),
            )  # [ROWS, BLOCK_S]
            # The softmax over near blocks starts from the parts' maximum: they need no rescaling.
            m = gl.convert_layout(gl.max(far_lse, 1), S_ROW)
            total = gl.zeros([ROWS], gl.float32, S_ROW)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
            pos = start + offs_r // BLOCK_G + shift
            own = pos // SEL_BLOCK
            mbarrier.wait(q_full, turn & 1)
            turn += 1
            first, steps, low = near_steps(start, end, shift, BLOCK_T, SEL_BLOCK)
            blocks_ptr, num_shared, places = tile_blocks(
                shared, sizes, start, kv_head, SHARED, MOST, BLOCK_T, TOP_N
            )
            for step in range(first, steps + num_shared):
                block = step_block(step, steps, low, blocks_ptr, SHARED)
                held = gl.max((listed == block).to(gl.int32), 1)
                held = gl.convert_layout(held, S_ROW) > 0
                held &= is_near(block, own) == (step < steps)
                k = _take(ring, bars, count, STAGES)
                fence_async_shared()
                s = warpgroup_mma(q_smem, k.permute((1, 0)), zero_s, use_acc=False)
                _give_back(bars, count, STAGES)
                count += 1
                seen = held[:, None] & (block * SEL_BLOCK + offs_n[None, :] <= pos[:, None])
                s = gl.where(seen, s, float("-inf"))  # [ROWS, SEL_BLOCK]
                p, m, total, alpha = softmax_step(s, m, total, scale_log2, True)
                acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
                p_half = gl.convert_layout(p.to(dtype), P_LAYOUT)
                v = _take(ring, bars, count, STAGES)
                fence_async_shared()
                token = warpgroup_mma(p_half, v, acc, is_async=True)
                acc, p_half = warpgroup_mma_wait(0, deps=[token, p_half])
                _give_back(bars, count, STAGES)
                count += 1
            thread_barrier()
            mbarrier.arrive(q_empty, count=1)

            m_ref = gl.where(m == float("-inf"), 0.0, m)
            weight = gl.exp2(far_lse - gl.convert_layout(m_ref, LIST_ROW)[:, None])
            total += gl.convert_layout(gl.sum(weight, 1), S_ROW)
            share = 1.0 / gl.where(total > 0.0, total, 1.0)
            stat = (start + offs_r // BLOCK_G).to(gl.int64)
            head = kv_head * GROUP + offs_r % BLOCK_G
            mask_r = (start + offs_r // BLOCK_G < end) & (offs_r % BLOCK_G < GROUP)
            if GATED:
                gate = gl.load(gate_slc_ptr + stat * heads + head, mask=mask_r, other=0.0)
                share *= gate.to(gl.float32)
            else:
                lse = gl.where(total > 0.0, (m_ref + gl.log2(total)) * LN2, float("-inf"))
                at = (stat // num_q * heads + head) * num_q + stat % num_q
                gl.store(lse_ptr + at, lse, mask=mask_r)
            acc = acc * gl.convert_layout(share, O_ROW)[:, None]
            weight *= gl.convert_layout(share, LIST_ROW)[:, None]
            weight_table.store(gl.permute(weight, (1, 0)))
            thread_barrier()
            while places != 0:
                place = first_place(places)
                places &= places - 1
                part = _take(ring, bars, count, STAGES).load(O_LAYOUT)
                _give_back(bars, count, STAGES, BOXES)
                count += 1
                acc += part.to(gl.float32) * weight_smem.index(place).load(O_ROW)[:, None]
            last = _take(ring, bars, count, STAGES)
            acc += (
                last.load(O_LAYOUT).to(gl.float32)
                * (weight_smem.index(TOP_N - 1).load(O_ROW)[:, None])
            )
            if GATED:
                flat = (start + offs_o // BLOCK_G).to(gl.int64) * heads
                flat += kv_head * GROUP + offs_o % BLOCK_G
                mask_o = (start + offs_o // BLOCK_G < end) & (offs_o % BLOCK_G < GROUP)
                gate_cmp = gl.load(gate_cmp_ptr + flat, mask=mask_o, other=0.0).to(gl.float32)
                gate_swa = gl.load(gate_swa_ptr + flat, mask=mask_o, other=0.0).to(gl.float32)
                _give_back(bars, count, STAGES, BOXES)
                count += 1
                part = _take(ring, bars, count, STAGES).load(O_LAYOUT)
                _give_back(bars, count, STAGES, BOXES)
                count += 1
                acc += part.to(gl.float32) * gate_cmp[:, None]
                last = _take(ring, bars, count, STAGES)
                acc += last.load(O_LAYOUT).to(gl.float32) * gate_swa[:, None]
            # The last buffer turns the output around for wide stores.
            thread_barrier()
            last.store(acc.to(dtype))
            thread_barrier()
            out = last.load(WIDE)
            _give_back(bars, count, STAGES, BOXES)
            count += 1
            flat = (start + offs_w // BLOCK_G).to(gl.int64) * heads
            flat += kv_head * GROUP + offs_w % BLOCK_G
            mask_w = (start + offs_w // BLOCK_G < end) & (offs_w % BLOCK_G < GROUP)
            gl.store(out_ptr + flat[:, None] * HEAD_DIM + col, out, mask=mask_w[:, None])


@gluon.jit(do_not_specialize=[*ROW_SIZES, "num_tiles", "num_items", "first_tile"])
def nsa_selected_hopper_combine_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, q_ptr, k_ptr, v_ptr, cmp_ptr, swa_ptr, gate_cmp_ptr,
    gate_slc_ptr, gate_swa_ptr, indices_ptr, cu_rows_ptr, cu_first_ptr, tiles_ptr,
    far_ptr, lists_ptr, counts_ptr, k_desc, v_desc,
    scale,
    octet_qb, octet_qt, octet_qh,
    octet_kb, octet_kt, octet_kh,
    octet_vb, octet_vt, octet_vh,
    first_row, num_rows, num_q, num_k, offset, num_kv_heads, num_tiles, num_items, first_tile,
    Q_LAYOUT: gl.constexpr, GROUP: gl.constexpr, TOP_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    SEL_BLOCK: gl.constexpr, MAPPED: gl.constexpr, VARLEN: gl.constexpr, GATED: gl.constexpr,
    SHARED: gl.constexpr, MOST: gl.constexpr, BOXES: gl.constexpr, BLOCK_G: gl.constexpr,
    BLOCK_S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Programs share the ``num_items`` tiles of ``SEL_BLOCK`` rows, ``num_tiles`` for a KV head.

    With ``SHARED`` a tile has blocks that many of its tokens chose, and that have no parts
    (``share.py``).  This launch computes the tiles from ``first_tile`` on.  With ``BOXES`` keys and
    values of a single sequence come in bulk copies (TMA), by descriptors of ``[B, N, H, D]``.

    Strides count groups of eight elements.  Results as of
    ``nsa_selected_combine_kernel``.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(
        q_ptr.dtype.element_ty, [STAGES, SEL_BLOCK, HEAD_DIM], Q_LAYOUT
    )
    q_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [SEL_BLOCK, HEAD_DIM], Q_LAYOUT)
    weight_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_S, SEL_BLOCK], FLAT)
    mask_smem = gl.allocate_shared_memory(gl.int32, [SEL_BLOCK], FLAT)
    row_smem = gl.allocate_shared_memory(gl.int32, [SEL_BLOCK], FLAT)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full, empty = ring_barriers(STAGES, 32 * COPY_WARPS, 1)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    mbarrier.init(q_full, count=32 * COPY_WARPS)
    mbarrier.init(q_empty, count=1)
    queries = (q_smem, q_full, q_empty)
    sizes = (first_row, num_rows, num_q, num_k, offset, num_kv_heads, num_tiles)
    maps = (cu_rows_ptr, cu_first_ptr, tiles_ptr)
    shared = (far_ptr, lists_ptr, counts_ptr, first_tile)
    gl.warp_specialize(
        [
            (_compute_partition, (
                (
                    out_ptr, lse_ptr, part_lse_ptr, gate_cmp_ptr, gate_slc_ptr, gate_swa_ptr,
                    indices_ptr,
                ),
                ring, (full, empty), queries, weight_smem, sizes, maps, shared, num_items, scale,
                GROUP, BLOCK_G, TOP_N, BLOCK_S, SEL_BLOCK, MAPPED, VARLEN, GATED, SHARED, MOST,
                BOXES, STAGES,
            )),
            (copy_partition, (
                (
                    part_ptr, q_ptr, k_ptr, v_ptr, cmp_ptr, swa_ptr, indices_ptr, k_desc, v_desc,
                ),
                ring, (full, empty), queries, mask_smem, row_smem,
                (
                    octet_qb, octet_qt, octet_qh, octet_kb, octet_kt, octet_kh, octet_vb,
                    octet_vt, octet_vh,
                ),
                sizes, maps, shared, num_items, GROUP, BLOCK_G, TOP_N, BLOCK_S, SEL_BLOCK,
                MAPPED, VARLEN, GATED, SHARED, MOST, BOXES, STAGES,
            )),
        ],
        [COPY_WARPS], [104],
    )  # fmt: skip

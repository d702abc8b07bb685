"""Gradient of queries for Hopper: one loading warp, two warpgroups that compute (Gluon).

The maths stands in ``bwd.py``.  A persistent program takes items of two times 64 query rows that
share a pattern row, as the forward kernel does: halves of a block of 128, or a block of 64 of two
heads of a group.  The loading warp streams the listed keys, 64 at a time.  A warpgroup keeps three
products in flight: while it computes the weights of one tile, the tensor cores make the scores of
the next, the gradients of the weights of this one, and the sum over the one before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import reinterpret, tma_load
from sparsek_kernels.common.kernels.softmax import LOG2E

ROWS: gl.constexpr = gl.constexpr(64)
KEYS: gl.constexpr = gl.constexpr(64)
SCAN: gl.constexpr = gl.constexpr(128)


@gluon.jit
def _blocks_below(list_ptr, begin, end, bound, WARPS: gl.constexpr):
    """How many of the ascending entries ``[begin, end)`` are below ``bound``, in every warp."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0]))
    count = 0
    for first in range(begin, end, SCAN):
        index = first + gl.arange(0, SCAN, layout=LAYOUT)
        entry = gl.load(list_ptr + index, mask=index < end, other=2147483647)
        count += gl.sum((entry < bound).to(gl.int32), 0)
    return count


@gluon.jit
def _place(
    turn,
    crow_ptr, col_ptr,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Item of this program's ``turn``-th turn, and the blocks that it lists.

    Returns ``(valid, batch, kv_head, member, row, begin, count, full)``: its first head within the
    group, its first query, and of the ``count`` listed blocks that are not wholly in the future,
    from entry ``begin`` on, the first ``full`` are wholly seen.

    Every second turn runs backwards, so that long and short items even out.
    """
    HEADS: gl.constexpr = 2 * ROWS // BLOCK
    MEMBERS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = gl.program_id(0)
    width = gl.num_programs(0)
    item = turn * width + gl.where(turn % 2 == 0, pid, width - 1 - pid)
    valid = item < num_items
    item = gl.minimum(item, num_items - 1)
    member = item % MEMBERS * HEADS
    rest = item // MEMBERS
    block_row = num_rows - 1 - rest % num_rows
    kv_head = rest // num_rows % num_kv_heads
    batch = rest // num_rows // num_kv_heads
    pattern = (kv_head * GROUP + member) // pattern_heads
    row = block_row * BLOCK
    crow = crow_ptr + pattern * (num_rows + 1) + block_row
    begin = gl.load(crow)
    end = gl.load(crow + 1)
    count = end - begin
    full = count
    if CAUSAL:
        first = row + num_k - num_q
        last = gl.minimum(row + BLOCK, num_q) + num_k - num_q
        count = _blocks_below(col_ptr, begin, end, gl.cdiv(gl.maximum(last, 0), BLOCK), WARPS)
        full = _blocks_below(col_ptr, begin, end, gl.maximum(first + 1, 0) // BLOCK, WARPS)
    return valid, batch, kv_head, member, row, begin, count, full


@gluon.jit
def _load_partition(
    q_desc, g_desc, k_desc, v_desc,
    q_smem, g_smem, k_smem, v_smem, bars,
    crow_ptr, col_ptr,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's items, as buffers become free."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    PER_BLOCK: gl.constexpr = BLOCK // KEYS
    BOX: gl.constexpr = q_desc.layout
    q_box = reinterpret(q_smem, q_smem.dtype, [2, 1, ROWS, 1, HEAD_DIM], BOX)
    g_box = reinterpret(g_smem, q_smem.dtype, [2, 1, ROWS, 1, HEAD_DIM], BOX)
    k_box = reinterpret(k_smem, q_smem.dtype, [STAGES, 1, KEYS, 1, HEAD_DIM], BOX)
    v_box = reinterpret(v_smem, q_smem.dtype, [STAGES, 1, KEYS, 1, HEAD_DIM], BOX)
    fetched = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        valid, batch, kv_head, member, row, begin, count, _full = _place(
            turn, crow_ptr, col_ptr, num_q, num_k, num_rows, num_kv_heads, num_items,
            pattern_heads, GROUP, CAUSAL, BLOCK, 1,
        )  # fmt: skip
        if valid:
            for i in gl.static_range(2):
                if PER_BLOCK == 2:
                    head = kv_head * GROUP + member
                    q_row = row + i * ROWS
                else:
                    head = kv_head * GROUP + gl.minimum(member + i, GROUP - 1)
                    q_row = row
                mbarrier.wait(q_empty.index(i), (turn & 1) ^ 1)
                mbarrier.expect(q_full.index(i), 2 * q_desc.block_type.nbytes)
                at = [batch, q_row, head, 0]
                tma_load(q_desc, at, q_full.index(i), q_box.index(i))
                tma_load(g_desc, at, q_full.index(i), g_box.index(i))
            for tile in range(count * PER_BLOCK):
                stage = fetched % STAGES
                free = ((fetched // STAGES) & 1) ^ 1
                block = gl.load(col_ptr + begin + tile // PER_BLOCK)
                at = [batch, block * BLOCK + tile % PER_BLOCK * KEYS, kv_head, 0]
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma_load(k_desc, at, k_full.index(stage), k_box.index(stage))
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                tma_load(v_desc, at, v_full.index(stage), v_box.index(stage))
                fetched += 1


@gluon.jit
def _compute_partition(
    dq_ptr, lse_ptr, delta_ptr,
    q_smem, g_smem, k_smem, v_smem,
    bars,
    crow_ptr, col_ptr,
    scale,
    stride_dqb, stride_dqt, stride_dqh,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 rows of each item, three products per tile of keys."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    dtype: gl.constexpr = q_smem.dtype
    PER_BLOCK: gl.constexpr = BLOCK // KEYS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    scale_log2 = scale * LOG2E
    fetched = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        valid, batch, kv_head, member, row, begin, count, full = _place(
            turn, crow_ptr, col_ptr, num_q, num_k, num_rows, num_kv_heads, num_items,
            pattern_heads, GROUP, CAUSAL, BLOCK, 4,
        )  # fmt: skip
        if valid:
            if PER_BLOCK == 2:
                row += INDEX * ROWS
            else:
                member += INDEX
            head = kv_head * GROUP + gl.minimum(member, GROUP - 1)
            stats = (batch.to(gl.int64) * num_kv_heads * GROUP + head) * num_q
            offs = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            lse = gl.load(lse_ptr + stats + offs, mask=offs < num_q, other=0.0) * LOG2E
            delta = gl.load(delta_ptr + stats + offs, mask=offs < num_q, other=0.0)
            tiles = count * PER_BLOCK
            plain = full * PER_BLOCK
            ds_half = gl.convert_layout(zero.to(dtype), P_LAYOUT)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, DQ_LAYOUT)
            mbarrier.wait(q_full.index(INDEX), turn & 1)
            q_tile = q_smem.index(INDEX).load(A_LAYOUT)
            g_tile = g_smem.index(INDEX).load(A_LAYOUT)
            for tile in range(tiles):
                # dq comes a tile late, as dk does in the kernel for keys.
                stage = fetched % STAGES
                before = (fetched - gl.where(tile > 0, 1, 0)) % STAGES
                mbarrier.wait(k_full.index(stage), (fetched // STAGES) & 1)
                s_token = warpgroup_mma(
                    q_tile, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                mbarrier.wait(v_full.index(stage), (fetched // STAGES) & 1)
                dp_token = warpgroup_mma(
                    g_tile, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                acc_token = warpgroup_mma(ds_half, k_smem.index(before), acc, is_async=True)
                s = warpgroup_mma_wait(2, deps=[s_token])
                p = gl.exp2(s * scale_log2 - lse[:, None])  # [rows, keys]
                if CAUSAL:  # noqa: SIM102 (known when compiled)
                    if tile >= plain:
                        block = gl.load(col_ptr + begin + tile // PER_BLOCK)
                        key = block * BLOCK + tile % PER_BLOCK * KEYS
                        key += gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
                        seen = key[None, :] <= (offs + num_k - num_q)[:, None]
                        p = gl.where(seen, p, 0.0)
                dp, p = warpgroup_mma_wait(1, deps=[dp_token, p])
                mbarrier.arrive(v_empty.index(stage), count=1)
                ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), P_LAYOUT)
                acc, ds_half, ds = warpgroup_mma_wait(0, deps=[acc_token, ds_half, ds])
                if tile > 0:
                    mbarrier.arrive(k_empty.index(before), count=1)
                else:  # q and dout are in registers for certain: products have read them
                    mbarrier.arrive(q_empty.index(INDEX), count=1)
                ds_half = ds
                fetched += 1
            if tiles > 0:
                last = (fetched - 1) % STAGES
                acc = warpgroup_mma(ds_half, k_smem.index(last), acc)
                mbarrier.arrive(k_empty.index(last), count=1)
            else:
                mbarrier.arrive(q_empty.index(INDEX), count=1)
            out_row = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, DQ_LAYOUT))
            column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, DQ_LAYOUT))
            base = dq_ptr + batch.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh
            offsets = out_row.to(gl.int64)[:, None] * stride_dqt + column[None, :]
            mask = (out_row < num_q) & (member < GROUP)
            gl.store(base + offsets, (acc * scale).to(dtype), mask=mask[:, None])


@gluon.jit
def block_sparse_hopper_dq_kernel(
    dq_ptr, q_desc, g_desc, k_desc, v_desc, lse_ptr, delta_ptr, crow_ptr, col_ptr,
    scale,
    stride_dqb, stride_dqt, stride_dqh,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor, each taking ``num_items / programs`` items.

    ``*_desc`` describe q, dout, k and v in boxes of 64 tokens of one head; ``num_k`` is a multiple
    of ``BLOCK``.
    """
    dtype: gl.constexpr = q_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], WIDE)
    g_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], WIDE)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], WIDE)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], WIDE)
    q_full, q_empty = ring_barriers(2, 1, 1)
    k_full, k_empty = ring_barriers(STAGES, 1, 2)
    v_full, v_empty = ring_barriers(STAGES, 1, 2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_compute_partition, (
                dq_ptr, lse_ptr, delta_ptr, q_smem, g_smem, k_smem, v_smem, bars, crow_ptr,
                col_ptr, scale, stride_dqb, stride_dqt, stride_dqh, num_q, num_k, num_rows,
                num_kv_heads, num_items, pattern_heads, GROUP, HEAD_DIM, CAUSAL, BLOCK,
                STAGES, 0,
            )),
            (_compute_partition, (
                dq_ptr, lse_ptr, delta_ptr, q_smem, g_smem, k_smem, v_smem, bars, crow_ptr,
                col_ptr, scale, stride_dqb, stride_dqt, stride_dqh, num_q, num_k, num_rows,
                num_kv_heads, num_items, pattern_heads, GROUP, HEAD_DIM, CAUSAL, BLOCK,
                STAGES, 1,
            )),
            (_load_partition, (
                q_desc, g_desc, k_desc, v_desc, q_smem, g_smem, k_smem, v_smem, bars, crow_ptr,
                col_ptr, num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
                GROUP, HEAD_DIM, CAUSAL, BLOCK, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

"""Forward kernel for Hopper: one loading warp, two warpgroups that compute (Gluon).

The maths stands in ``fwd.py``.  A persistent program takes items of two times 64 query
rows that share a pattern row: halves of a block of 128, or a block of 64 of two heads of a group.
The loading warp walks the listed blocks and streams 128 keys at a time through shared memory with
TMA; each warpgroup owns 64 rows and issues ``q k_j`` and ``p_{j-1} v_{j-1}`` together, so that the
softmax of one tile overlaps the second product of the tile before (FlashAttention-3, arXiv
2407.08608, sections 3.1 and 3.2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.softmax import LN2
from sparsek_kernels.common.kernels.softmax_sm90 import anchor, softmax_step

ROWS: gl.constexpr = gl.constexpr(64)
KEYS: gl.constexpr = gl.constexpr(128)
SCAN: gl.constexpr = gl.constexpr(128)
NO_BLOCK: gl.constexpr = gl.constexpr(0x00800000)


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
    step,
    crow_ptr, col_ptr,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Item of this program's ``step``-th turn, and the blocks that it lists.

    Returns ``(valid, batch, kv_head, member, row, begin, count, full)``: its first head within the
    group, its first query, and of the ``count`` listed blocks that are not wholly in the future,
    from entry ``begin`` on, the first ``full`` are wholly seen.

    Every second turn runs backwards, so that long and short items even out; heads of a group are
    neighbours, then rows of blocks from the last to the first: what runs together shares K and V.
    """
    HEADS: gl.constexpr = 2 * ROWS // BLOCK
    MEMBERS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = gl.program_id(0)
    width = gl.num_programs(0)
    item = step * width + gl.where(step % 2 == 0, pid, width - 1 - pid)
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
def _load_tile(
    desc, smem, full, buffer, first_row, column, col_ptr, begin, entry, count,
    BLOCK: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """128 listed rows of K or V, block below block; past the list, zeros."""
    PER_TILE: gl.constexpr = KEYS // BLOCK
    mbarrier.expect(full, PER_TILE * PARTS * desc.block_type.nbytes)
    for i in gl.static_range(PER_TILE):
        inside = entry + i < count
        block = gl.load(col_ptr + begin + entry + i, mask=inside, other=NO_BLOCK)
        at = gl.where(inside, first_row + block * BLOCK, NO_BLOCK * ROWS)
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                desc, [at, column + part * 64], full, smem.index(buffer + part * PER_TILE + i)
            )


@gluon.jit
def _load_partition(
    q_desc, k_desc, v_desc,
    q_smem, k_smem, v_smem, bars,
    crow_ptr, col_ptr,
    q_batch_rows, k_batch_rows, v_batch_rows,
    q_head_cols, k_head_cols, v_head_cols,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Issue every TMA load of this program's items, as buffers become free."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    PARTS: gl.constexpr = HEAD_DIM // 64
    PER_TILE: gl.constexpr = KEYS // BLOCK
    fetched = 0
    for step in range(gl.cdiv(num_items, gl.num_programs(0))):
        valid, batch, kv_head, member, row, begin, count, _full = _place(
            step, crow_ptr, col_ptr, num_q, num_k, num_rows, num_kv_heads, num_items,
            pattern_heads, GROUP, CAUSAL, BLOCK, 1,
        )  # fmt: skip
        if valid:
            for i in gl.static_range(2):
                if BLOCK == 2 * ROWS:
                    head = kv_head * GROUP + member
                    q_row = row + i * ROWS
                else:
                    head = kv_head * GROUP + gl.minimum(member + i, GROUP - 1)
                    q_row = row
                mbarrier.wait(q_empty.index(i), (step & 1) ^ 1)
                mbarrier.expect(q_full.index(i), PARTS * q_desc.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        q_desc, [batch * q_batch_rows + q_row, head * q_head_cols + part * 64],
                        q_full.index(i), q_smem.index(i * PARTS + part),
                    )  # fmt: skip
            for tile in range(gl.maximum(gl.cdiv(count, PER_TILE), 1)):
                stage = fetched % STAGES
                buffer = stage * PARTS * PER_TILE
                free = ((fetched // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), free)
                _load_tile(
                    k_desc, k_smem, k_full.index(stage), buffer, batch * k_batch_rows,
                    kv_head * k_head_cols, col_ptr, begin, tile * PER_TILE, count, BLOCK, PARTS,
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), free)
                _load_tile(
                    v_desc, v_smem, v_full.index(stage), buffer, batch * v_batch_rows,
                    kv_head * v_head_cols, col_ptr, begin, tile * PER_TILE, count, BLOCK, PARTS,
                )  # fmt: skip
                fetched += 1


@gluon.jit
def _mask(
    s, pos, col_ptr, begin, entry, count, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the tile from list entry ``entry`` on, ``-inf`` where a row does not see a key."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    place = entry + column // BLOCK
    block = gl.load(col_ptr + begin + place, mask=place < count, other=NO_BLOCK)
    seen = (place < count)[None, :]
    if CAUSAL:
        seen = seen & ((block * BLOCK + column % BLOCK)[None, :] <= pos[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _attend_tiles(
    acc, p, m, total, fetched, first, last, q_tile, k_wide, v_wide,
    k_full, k_empty, v_full, v_empty,
    lse_ptr,
    pos,
    col_ptr,
    begin, count, scale_log2,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles ``first .. last``; ``p`` holds the weights of the tile before, not yet applied."""
    for tile in range(first, last):
        stage = fetched % STAGES
        before = (fetched - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (fetched // STAGES) & 1)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((fetched - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_wide.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        if MASKED:
            s = _mask(s, pos, col_ptr, begin, tile * (KEYS // BLOCK), count, CAUSAL, BLOCK,
                      S_LAYOUT)  # fmt: skip
        weights, m, total, alpha = softmax_step(s, m, total, scale_log2, MASKED)
        p_next = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
        total = anchor(total, lse_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_token, p, p_next])
        mbarrier.arrive(v_empty.index(before), count=1)
        p = p_next
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        fetched += 1
    return acc, p, m, total, fetched


@gluon.jit
def _attend_partition(
    out_ptr, lse_ptr,
    q_wide, k_wide, v_wide,
    bars,
    crow_ptr, col_ptr,
    scale_log2,
    stride_ob, stride_ot, stride_oh,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 rows of each item, from scores to output."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    PER_TILE: gl.constexpr = KEYS // BLOCK
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_tile = q_wide.index(INDEX)
    fetched = 0
    for step in range(gl.cdiv(num_items, gl.num_programs(0))):
        valid, batch, kv_head, member, row, begin, count, full = _place(
            step, crow_ptr, col_ptr, num_q, num_k, num_rows, num_kv_heads, num_items,
            pattern_heads, GROUP, CAUSAL, BLOCK, 4,
        )  # fmt: skip
        if valid:
            if BLOCK == 2 * ROWS:
                row += INDEX * ROWS
            else:
                member += INDEX
            head = kv_head * GROUP + gl.minimum(member, GROUP - 1)
            tiles = gl.maximum(gl.cdiv(count, PER_TILE), 1)
            pos = row + gl.arange(0, ROWS, layout=ROW_LAYOUT) + num_k - num_q
            m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
            total = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
            stage = fetched % STAGES
            mbarrier.wait(q_full.index(INDEX), step & 1)
            mbarrier.wait(k_full.index(stage), (fetched // STAGES) & 1)
            zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
            s_token = warpgroup_mma(
                q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[s_token])
            mbarrier.arrive(k_empty.index(stage), count=1)
            s = _mask(s, pos, col_ptr, begin, 0, count, CAUSAL, BLOCK, S_LAYOUT)
            weights, m, total, _alpha = softmax_step(s, m, total, scale_log2, True)
            p = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
            fetched += 1
            plain = gl.maximum(full // PER_TILE, 1)
            acc, p, m, total, fetched = _attend_tiles(
                acc, p, m, total, fetched, 1, plain, q_tile, k_wide, v_wide, k_full, k_empty,
                v_full, v_empty, lse_ptr, pos, col_ptr, begin, count, scale_log2, False, CAUSAL,
                BLOCK, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
            acc, p, m, total, fetched = _attend_tiles(
                acc, p, m, total, fetched, plain, tiles, q_tile, k_wide, v_wide, k_full, k_empty,
                v_full, v_empty, lse_ptr, pos, col_ptr, begin, count, scale_log2, True, CAUSAL,
                BLOCK, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(INDEX), count=1)
            before = (fetched - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((fetched - 1) // STAGES) & 1)
            acc_token = warpgroup_mma(p, v_wide.index(before), acc, is_async=True)
            empty = total == 0.0
            lse = gl.where(empty, float("-inf"), (m + gl.log2(total)) * LN2)
            inverse = 1.0 / gl.where(empty, 1.0, total)
            acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
            lse_row = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            base = (batch.to(gl.int64) * num_kv_heads * GROUP + head) * num_q
            gl.store(lse_ptr + base + lse_row, lse, mask=(lse_row < num_q) & (member < GROUP))
            out_row = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
            column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
            head_out = out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
            offsets = out_row.to(gl.int64)[:, None] * stride_ot + column[None, :]
            mask = (out_row < num_q) & (member < GROUP)
            gl.store(head_out + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@gluon.jit
def block_sparse_hopper_fwd_kernel(
    out_ptr, lse_ptr, q_desc, k_desc, v_desc, crow_ptr, col_ptr,
    scale_log2,
    stride_ob, stride_ot, stride_oh,
    q_batch_rows, k_batch_rows, v_batch_rows,
    q_head_cols, k_head_cols, v_head_cols,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor, each taking ``num_items / programs`` items.

    ``*_desc`` describe q, k and v as matrices ``[tokens, heads * D]`` in boxes of 64 columns, 64
    rows for q, ``BLOCK`` for k and v; ``*_batch_rows`` and ``*_head_cols`` are the distances
    between sequences and heads in them.  ``num_k`` is a multiple of ``BLOCK``.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    BOXES: gl.constexpr = PARTS * (KEYS // BLOCK)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    K_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BLOCK, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BLOCK, 64], v_desc.layout)
    q_wide = q_smem._reinterpret(dtype, [2, ROWS, HEAD_DIM], Q_WIDE)
    k_wide = k_smem._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], K_WIDE)
    v_wide = v_smem._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], K_WIDE)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (
                _attend_partition,
                (
                    out_ptr, lse_ptr, q_wide, k_wide, v_wide, bars, crow_ptr, col_ptr, scale_log2,
                    stride_ob, stride_ot, stride_oh, num_q, num_k, num_rows, num_kv_heads,
                    num_items, pattern_heads, GROUP, HEAD_DIM, CAUSAL, BLOCK, STAGES, 0,
                ),
            ),
            (
                _attend_partition,
                (
                    out_ptr, lse_ptr, q_wide, k_wide, v_wide, bars, crow_ptr, col_ptr, scale_log2,
                    stride_ob, stride_ot, stride_oh, num_q, num_k, num_rows, num_kv_heads,
                    num_items, pattern_heads, GROUP, HEAD_DIM, CAUSAL, BLOCK, STAGES, 1,
                ),
            ),
            (
                _load_partition,
                (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, crow_ptr, col_ptr,
                    q_batch_rows, k_batch_rows, v_batch_rows, q_head_cols, k_head_cols,
                    v_head_cols, num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
                    GROUP, HEAD_DIM, CAUSAL, BLOCK, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

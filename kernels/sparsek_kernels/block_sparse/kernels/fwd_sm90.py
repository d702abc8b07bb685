"""Forward kernel for Hopper: a warp plans, a warp loads, two warpgroups compute (Gluon).

The maths stands in ``fwd.py``.  A persistent program takes items of two times 64 query
rows that share a pattern row: halves of a block of 128, or a block of 64 of two heads of a group.
Keys come 128 at a time; each warpgroup owns 64 rows and issues ``q k_j`` and ``p_{j-1} v_{j-1}``
together, so that the softmax of one tile overlaps the second product of the tile before
(FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2).

Lists are short, so the same holds from item to item: the tiles of all items are one sequence.  The
last product of an item goes with the first of the next, and its rows are stored while that goes on.
Tile ``j`` of keys and tile ``j - 1`` of values therefore have the same number; number 0 of the
values is never filled, and what it gives is not stored.
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

from sparsek_kernels.block_sparse.kernels.fwd_load_sm90 import (
    FIELDS,
    KEYS,
    NO_BLOCK,
    PLANS,
    ROWS,
    load_partition,
    plan_partition,
    take_plan,
)
from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier, tma_store
from sparsek_kernels.common.kernels.plans_sm90 import plan_ring
from sparsek_kernels.common.kernels.softmax import LN2
from sparsek_kernels.common.kernels.softmax_sm90 import anchor, softmax_lanes_step


@gluon.jit
def _mask(
    s, pos, first_block, second_block, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a tile of one or two blocks, ``-inf`` where a row does not see a key."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    key = first_block * BLOCK + column
    if BLOCK == ROWS:
        key = gl.where(column < BLOCK, key, (second_block - 1) * BLOCK + column)
    seen = key[None, :] <= pos[:, None] if CAUSAL else (key < NO_BLOCK * BLOCK)[None, :]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _blocks(col_ptr, begin, tile, count, BLOCK: gl.constexpr):
    """Blocks of tile ``tile`` of a list; past the list, ``NO_BLOCK``."""
    entry = tile * (KEYS // BLOCK)
    first = gl.load(col_ptr + begin + entry, mask=entry < count, other=NO_BLOCK)
    second = first
    if BLOCK == ROWS:
        second = gl.load(col_ptr + begin + entry + 1, mask=entry + 1 < count, other=NO_BLOCK)
    return first, second


@gluon.jit
def _attend_tiles(
    acc, p, m, total, fetched, first, last, tiles, q_tile, k_wide, v_wide, bars,
    lse_ptr,
    pos,
    col_ptr,
    begin, count, scale_log2,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles ``first .. last``, counted from the end of the list of ``tiles``.

    ``p`` holds the weights of the tile before, not yet applied.
    """
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = bars
    for tile in range(first, last):
        if MASKED:
            one, two = _blocks(col_ptr, begin, tiles - 1 - tile, count, BLOCK)
        stage = fetched % STAGES
        phase = (fetched // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(stage), phase)
        acc_token = warpgroup_mma(p, v_wide.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        if MASKED:
            s = _mask(s, pos, one, two, CAUSAL, BLOCK, S_LAYOUT)
        weights, m, total, alpha = softmax_lanes_step(s, m, total, scale_log2, MASKED)
        p_next = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
        total = anchor(total, lse_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_token, p, p_next])
        mbarrier.arrive(v_empty.index(stage), count=1)
        p = p_next
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        fetched += 1
    return acc, p, m, total, fetched


@gluon.jit
def _store(
    acc, m, total, batch, head, row, out_desc, lse_ptr, num_q, num_heads, out_wide, out_smem,
    HEAD_DIM: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Rows of a finished item, by a copy that goes on while the next item is computed."""
    O_LAYOUT: gl.constexpr = acc.type.layout
    PARTS: gl.constexpr = HEAD_DIM // 64
    total = gl.convert_layout(gl.sum(total, 1), m.type.layout)
    empty = total == 0.0
    lse = gl.where(empty, float("-inf"), (m + gl.log2(total)) * LN2)
    inverse = 1.0 / gl.where(empty, 1.0, total)
    rows = row + gl.arange(0, ROWS, layout=total.type.layout)
    base = lse_ptr + (batch.to(gl.int64) * num_heads + head) * num_q
    gl.store(base + rows, lse, mask=rows < num_q)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
    tma.store_wait(0)
    thread_barrier()
    out_wide.index(INDEX).store(acc.to(out_wide.dtype))
    fence_async_shared()
    thread_barrier()
    for part in gl.static_range(PARTS):
        box = out_smem.index(INDEX * PARTS + part)
        tma_store(out_desc, [batch, row, head, part * 64], box)


@gluon.jit
def _attend_partition(
    out_desc, lse_ptr, q_wide, k_wide, v_wide, out_wide, out_smem, plans, plan_full, plan_empty,
    bars, col_ptr, scale_log2, num_q, num_k, num_heads,
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
    # Of each row, a sum for each of the four lanes that share it.
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    p = gl.zeros([ROWS, KEYS], v_wide.dtype, P_LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    total = gl.zeros([ROWS, 4], gl.float32, LANES)
    stored = False
    batch = 0
    head = 0
    row = 0
    fetched = 0
    turn = 0
    more = True
    while more:
        more, next_batch, kv_head, member, next_row, begin, count, full = take_plan(
            plans, plan_full, plan_empty, turn, 4
        )
        if BLOCK == 2 * ROWS:
            next_row += INDEX * ROWS
        else:
            member += INDEX
        tiles = gl.maximum(gl.cdiv(count, PER_TILE), 1)
        masked = gl.maximum(tiles - full // PER_TILE, 1)
        one, two = _blocks(col_ptr, begin, tiles - 1, count, BLOCK)
        pos = next_row + gl.arange(0, ROWS, layout=ROW_LAYOUT) + num_k - num_q
        q_tile = q_wide.index(turn % 2 * 2 + INDEX)
        stage = fetched % STAGES
        phase = (fetched // STAGES) & 1
        mbarrier.wait(q_full.index(turn % 2), (turn // 2) & 1)
        mbarrier.wait(k_full.index(stage), phase)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_tile, k_wide.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(stage), phase)
        acc_token = warpgroup_mma(p, v_wide.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        s = _mask(s, pos, one, two, CAUSAL, BLOCK, S_LAYOUT)
        nothing = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
        weights, next_m, next_total, _alpha = softmax_lanes_step(
            s, nothing, gl.zeros([ROWS, 4], gl.float32, LANES), scale_log2, True
        )
        p_next = gl.convert_layout(weights.to(v_wide.dtype), P_LAYOUT)
        next_total = anchor(next_total, lse_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_token, p, p_next])
        mbarrier.arrive(v_empty.index(stage), count=1)
        if stored:
            _store(
                acc, m, total, batch, head, row, out_desc, lse_ptr, num_q, num_heads, out_wide,
                out_smem, HEAD_DIM, INDEX,
            )  # fmt: skip
        stored = more & (member < GROUP)
        batch = next_batch
        head = kv_head * GROUP + member
        row = next_row
        fetched += 1
        acc, p, m, total, fetched = _attend_tiles(
            gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT), p_next, next_m, next_total, fetched,
            1, masked, tiles, q_tile, k_wide, v_wide, bars, lse_ptr, pos, col_ptr, begin, count,
            scale_log2, True, CAUSAL, BLOCK, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        acc, p, m, total, fetched = _attend_tiles(
            acc, p, m, total, fetched, masked, tiles, tiles, q_tile, k_wide, v_wide, bars, lse_ptr,
            pos, col_ptr, begin, count, scale_log2, False, CAUSAL, BLOCK, STAGES, S_LAYOUT,
            O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(turn % 2), count=1)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def block_sparse_hopper_fwd_kernel(
    lse_ptr, out_desc, q_desc, k_desc, v_desc, crow_ptr, col_ptr, queue_ptr,
    scale_log2,
    q_batch_rows, k_batch_rows, v_batch_rows,
    q_head_cols, k_head_cols, v_head_cols,
    num_q, num_k, num_rows, num_kv_heads, num_items, pattern_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor, which draws items from the queue of ``item_queue.py``.

    ``{q,k,v}_desc`` describe q, k and v as matrices ``[tokens, heads * D]`` in boxes of 64 columns,
    64 rows for q, ``BLOCK`` for k and v; ``*_batch_rows`` and ``*_head_cols`` are the distances
    between sequences and heads in them.  ``out_desc`` describes boxes ``[1, 64, 1, 64]`` of the
    output.  ``num_k`` is a multiple of ``BLOCK``.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    BOXES: gl.constexpr = PARTS * (KEYS // BLOCK)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    K_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [4 * PARTS, ROWS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BLOCK, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BLOCK, 64], v_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [2 * PARTS, 1, ROWS, 1, 64], out_desc.layout)
    q_wide = reinterpret(q_smem, dtype, [4, ROWS, HEAD_DIM], Q_WIDE)
    k_wide = reinterpret(k_smem, dtype, [STAGES, KEYS, HEAD_DIM], K_WIDE)
    v_wide = reinterpret(v_smem, dtype, [STAGES, KEYS, HEAD_DIM], K_WIDE)
    out_wide = reinterpret(out_smem, dtype, [2, ROWS, HEAD_DIM], Q_WIDE)
    plans, plan_full, plan_empty = plan_ring(PLANS, FIELDS, 3)
    q_full, q_empty = ring_barriers(2, 1, 2)
    k_full, k_empty = ring_barriers(STAGES, 1, 2)
    v_full, v_empty = ring_barriers(STAGES, 1, 2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_attend_partition, (
                out_desc, lse_ptr, q_wide, k_wide, v_wide, out_wide, out_smem, plans,
                plan_full, plan_empty, bars, col_ptr, scale_log2, num_q, num_k,
                num_kv_heads * GROUP, GROUP, HEAD_DIM, CAUSAL, BLOCK, STAGES, 0,
            )),
            (_attend_partition, (
                out_desc, lse_ptr, q_wide, k_wide, v_wide, out_wide, out_smem, plans,
                plan_full, plan_empty, bars, col_ptr, scale_log2, num_q, num_k,
                num_kv_heads * GROUP, GROUP, HEAD_DIM, CAUSAL, BLOCK, STAGES, 1,
            )),
            (load_partition, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, plans, plan_full, plan_empty,
                bars, col_ptr, q_batch_rows, k_batch_rows, v_batch_rows, q_head_cols,
                k_head_cols, v_head_cols, GROUP, HEAD_DIM, BLOCK, STAGES,
            )),
            (plan_partition, (
                queue_ptr, crow_ptr, col_ptr, plans, plan_full, plan_empty, num_q, num_k,
                num_rows, num_kv_heads, num_items, pattern_heads, GROUP, CAUSAL, BLOCK,
            )),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip

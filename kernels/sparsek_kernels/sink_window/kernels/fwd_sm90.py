"""Forward kernel for Hopper: one loading warp, two warpgroups that compute (Gluon).

The maths stands in ``fwd.py``.  A persistent program takes tiles of ``2 x 64`` query rows:
of one head, or the same tokens of two heads that share K and V.  The loading warp streams K and V
through shared memory with TMA; each computing warpgroup owns 64 rows and issues ``q k_j`` and
``p_{j-1} v_{j-1}`` together, so that the softmax of block ``j`` overlaps the second product
(FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2).
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
from sparsek_kernels.common.kernels.gluon_names import thread_barrier
from sparsek_kernels.common.kernels.masks import visible
from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.common.kernels.softmax_sm90 import anchor, softmax_step
from sparsek_kernels.common.kernels.tiles_sm90 import tile_index
from sparsek_kernels.sink_window.kernels.fwd_load_sm90 import ROWS, load_partition, tile_place


@gluon.jit
def _mask(
    s, pos, first_key, k_len, num_sink, window_size,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores with ``-inf`` where a row does not see a key; rows past the end do not matter."""
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    if CAUSAL:
        seen = visible(pos[:, None], key[None, :], num_sink, window_size, True, WINDOWED, True)
    else:
        seen = (key < k_len)[None, :]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _zero_tail(
    buffer, num_valid, both_done, phase,
    ROWS_HELD: gl.constexpr, COLS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Clear rows from ``num_valid`` on: they may hold NaN of a neighbouring sequence.

    Each of the two warpgroups that read the buffer clears its half and waits for the other.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])
    HALF: gl.constexpr = ROWS_HELD // 2
    half = buffer.slice(INDEX * HALF, HALF)
    row = INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    held = half.load(LAYOUT)
    half.store(gl.where((row < num_valid)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(both_done, count=1)
    mbarrier.wait(both_done, phase & 1)


@gluon.jit
def _compute_blocks(
    acc, p, m, total, count, first, last,
    q_buf, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    lse_ptr,
    pos, start, k_len, num_sink, window_size, scale_log2,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Blocks ``first .. last``; ``p`` holds the weights of the block before, not yet applied."""
    for j in range(first, last):
        stage = count % STAGES
        before = (count - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_buf, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        if MASKED:
            s = _mask(
                s, pos, start + j * BLOCK_N, k_len, num_sink, window_size, CAUSAL, WINDOWED,
                BLOCK_N, S_LAYOUT,
            )  # fmt: skip
        weights, m, total, alpha = softmax_step(s, m, total, scale_log2, MASKED)
        p_next = gl.convert_layout(weights.to(v_smem.dtype), P_LAYOUT)
        total = anchor(total, lse_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_token, p, p_next])
        mbarrier.arrive(v_empty.index(before), count=1)
        p = p_next
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        count += 1
    return acc, p, m, total, count


@gluon.jit
def _compute_partition(
    out_ptr, lse_ptr,
    q_smem, k_smem, v_smem, sink_k_smem, sink_v_smem, bars,
    sinks_ptr, tiles_ptr, cu_q_ptr, cu_k_ptr,
    scale_log2, num_sink, window_size,
    stride_ob, stride_ot, stride_oh,
    num_q, num_k, num_heads, num_blocks, num_tiles, heads_together,
    GROUP: gl.constexpr, HAS_SINK_KEYS: gl.constexpr, HAS_SINKS: gl.constexpr,
    STORE_LSE: gl.constexpr, VARLEN: gl.constexpr, PAIRED: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr,
    HOLD_Q: gl.constexpr, STAGES: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half ``INDEX`` of the rows of each tile, from scores to output."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, sink_full, sink_empty, tail_done = bars
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SINK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_S, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    TOKENS: gl.constexpr = ROWS if PAIRED else 2 * ROWS
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    count = 0
    done = 0
    tails = 0
    steps = gl.cdiv(num_tiles, gl.num_programs(0))
    for step in range(steps):
        tile = tile_index(step)
        if tile < num_tiles:
            (
                valid, batch, head, _kv_head, q_start, q_len, _k_start, k_len, row, start,
                n_left, n_full, n_all,
            ) = tile_place(
                tile, tiles_ptr, cu_q_ptr, cu_k_ptr, num_q, num_k, num_blocks, num_heads,
                heads_together, window_size, GROUP, VARLEN, PAIRED, CAUSAL, WINDOWED, BLOCK_N,
            )  # fmt: skip
            if valid:
                if PAIRED:
                    head += INDEX
                else:
                    row += INDEX * ROWS
                rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
                pos = rows + (k_len - q_len)
                if HAS_SINKS:
                    logit = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
                    m = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT) + logit
                    total = gl.where(m == float("-inf"), 0.0, 1.0)
                else:
                    m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
                    total = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
                acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
                q_buf = q_smem.index(INDEX)
                stage = count % STAGES
                mbarrier.wait(q_full.index(INDEX), done & 1)
                if HOLD_Q:
                    q_buf = q_buf.load(Q_LAYOUT)
                if HAS_SINK_KEYS:
                    mbarrier.wait(sink_full, done & 1)
                    sink_zero = gl.zeros([ROWS, BLOCK_S], gl.float32, SINK_LAYOUT)
                    sink_token = warpgroup_mma(
                        q_buf, sink_k_smem.permute((1, 0)), sink_zero, use_acc=False, is_async=True
                    )
                mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
                s_token = warpgroup_mma(
                    q_buf, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                if HAS_SINK_KEYS:
                    sink_s = warpgroup_mma_wait(1, deps=[sink_token])
                    sink_key = gl.arange(0, BLOCK_S, layout=gl.SliceLayout(0, SINK_LAYOUT))
                    sink_seen = (sink_key < gl.minimum(num_sink, start))[None, :]
                    sink_s = gl.where(sink_seen, sink_s, float("-inf"))
                    m = gl.convert_layout(m, gl.SliceLayout(1, SINK_LAYOUT))
                    total = gl.convert_layout(total, gl.SliceLayout(1, SINK_LAYOUT))
                    sink_w, m, total, _alpha = softmax_step(sink_s, m, total, scale_log2, True)
                    m = gl.convert_layout(m, ROW_LAYOUT)
                    total = gl.convert_layout(total, ROW_LAYOUT)
                    if k_len < BLOCK_S:
                        _zero_tail(sink_v_smem, k_len, tail_done, tails, BLOCK_S, HEAD_DIM, INDEX)
                        tails += 1
                    sink_p = gl.convert_layout(sink_w.to(v_smem.dtype), P_LAYOUT)
                    acc_token = warpgroup_mma(
                        sink_p, sink_v_smem, acc, use_acc=False, is_async=True
                    )
                    s = warpgroup_mma_wait(1, deps=[s_token])
                else:
                    s = warpgroup_mma_wait(0, deps=[s_token])
                mbarrier.arrive(k_empty.index(stage), count=1)
                if HOLD_Q:  # it is in registers for certain: a product has read it
                    mbarrier.arrive(q_empty.index(INDEX), count=1)
                s = _mask(
                    s, pos, start, k_len, num_sink, window_size, CAUSAL, WINDOWED, BLOCK_N,
                    S_LAYOUT,
                )  # fmt: skip
                weights, m, total, alpha = softmax_step(s, m, total, scale_log2, True)
                if HAS_SINK_KEYS:
                    acc, sink_p = warpgroup_mma_wait(0, deps=[acc_token, sink_p])
                    mbarrier.arrive(sink_empty, count=1)
                    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
                p = gl.convert_layout(weights.to(v_smem.dtype), P_LAYOUT)
                count += 1

                # No more tokens than keys of a block: the window begins in the first one.
                if WINDOWED and TOKENS > BLOCK_N:
                    acc, p, m, total, count = _compute_blocks(
                        acc, p, m, total, count, 1, n_left, q_buf, k_smem, v_smem,
                        k_full, k_empty, v_full, v_empty, lse_ptr, pos,
                        start, k_len, num_sink, window_size, scale_log2,
                        True, CAUSAL, WINDOWED, BLOCK_N, STAGES,
                        S_LAYOUT, O_LAYOUT, P_LAYOUT,
                    )  # fmt: skip
                acc, p, m, total, count = _compute_blocks(
                    acc, p, m, total, count, gl.maximum(n_left, 1), n_full, q_buf, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty, lse_ptr, pos,
                    start, k_len, num_sink, window_size, scale_log2,
                    False, CAUSAL, WINDOWED, BLOCK_N, STAGES,
                    S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
                acc, p, m, total, count = _compute_blocks(
                    acc, p, m, total, count, gl.maximum(n_full, 1), n_all, q_buf, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty, lse_ptr, pos,
                    start, k_len, num_sink, window_size, scale_log2,
                    True, CAUSAL, False, BLOCK_N, STAGES,
                    S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip

                if not HOLD_Q:
                    mbarrier.arrive(q_empty.index(INDEX), count=1)
                before = (count - 1) % STAGES
                mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
                v_tail = k_len - (start + (n_all - 1) * BLOCK_N)
                if v_tail < BLOCK_N:
                    _zero_tail(
                        v_smem.index(before), v_tail, tail_done, tails, BLOCK_N, HEAD_DIM, INDEX
                    )
                    tails += 1
                acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
                empty = total == 0.0
                lse = gl.where(empty, float("-inf"), (m + gl.log2(total)) * LN2)
                inv_l = 1.0 / gl.where(empty, 1.0, total)
                lse_rows = rows + q_start
                if STORE_LSE:
                    lse_base = lse_ptr + (batch.to(gl.int64) * num_heads + head) * num_q
                    gl.store(lse_base + lse_rows, lse, mask=rows < q_len)
                acc = warpgroup_mma_wait(0, deps=[acc_token])
                mbarrier.arrive(v_empty.index(before), count=1)
                acc = acc * gl.convert_layout(inv_l, gl.SliceLayout(1, O_LAYOUT))[:, None]
                stored = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORE_LAYOUT)
                out_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, STORE_LAYOUT))
                col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORE_LAYOUT))
                head_out = out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
                offs = (q_start + out_row).to(gl.int64)[:, None] * stride_ot + col[None, :]
                gl.store(head_out + offs, stored, mask=(out_row < q_len)[:, None])
                done += 1


@gluon.jit
def sink_window_hopper_fwd_kernel(
    out_ptr, lse_ptr, q_desc, k_desc, v_desc, sink_k_desc, sink_v_desc, sinks_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, tiles_ptr,
    scale_log2, num_sink, window_size,
    stride_ob, stride_ot, stride_oh,
    q_batch_rows, k_batch_rows, v_batch_rows, q_head_cols, k_head_cols, v_head_cols,
    num_q, num_k, num_heads, num_blocks, num_tiles,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    HAS_SINK_KEYS: gl.constexpr, HAS_SINKS: gl.constexpr, STORE_LSE: gl.constexpr,
    VARLEN: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, HOLD_Q: gl.constexpr,
    heads_together=1,
):  # fmt: skip
    """Grid: one program per multiprocessor, each taking ``num_tiles / programs`` tiles.

    ``*_desc`` describe q, k and v as matrices ``[tokens, heads * D]``; ``*_batch_rows`` and
    ``*_head_cols`` are the distances between sequences and heads in them.

    With ``PAIRED`` a tile has 64 rows of two heads, else 128 rows of one.  With ``HOLD_Q`` (and no
    sink keys) a warpgroup takes its rows to registers: the buffer is free for the next tile, and
    products of 64 keys, which read as much of q as of k, wait less for shared memory.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
    sink_k_smem = k_smem.index(0)
    sink_v_smem = v_smem.index(0)
    if HAS_SINK_KEYS:
        sink_k_smem = gl.allocate_shared_memory(dtype, [BLOCK_S, HEAD_DIM], sink_k_desc.layout)
        sink_v_smem = gl.allocate_shared_memory(dtype, [BLOCK_S, HEAD_DIM], sink_v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full, q_empty = ring_barriers(2, 1, 1)
    k_full, k_empty = ring_barriers(STAGES, 1, 2)
    v_full, v_empty = ring_barriers(STAGES, 1, 2)
    # Without sinks these would have no user, and their memory would go to other data.
    sink_full = q_full
    sink_empty = q_empty
    if HAS_SINK_KEYS:
        sink_full = gl.allocate_shared_memory(gl.int64, [1], bar)
        sink_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
        mbarrier.init(sink_full, count=1)
        mbarrier.init(sink_empty, count=2)
    tail_done = gl.allocate_shared_memory(gl.int64, [1], bar)
    mbarrier.init(tail_done, count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, sink_full, sink_empty, tail_done)
    gl.warp_specialize(
        [
            (_compute_partition, (
                out_ptr, lse_ptr, q_smem, k_smem, v_smem, sink_k_smem, sink_v_smem, bars,
                sinks_ptr, tiles_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale_log2, num_sink,
                window_size, stride_ob, stride_ot, stride_oh, num_q, num_k, num_heads,
                num_blocks, num_tiles, heads_together, GROUP, HAS_SINK_KEYS, HAS_SINKS,
                STORE_LSE, VARLEN, PAIRED, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_N, BLOCK_S,
                HOLD_Q, STAGES, 0,
            )),
            (_compute_partition, (
                out_ptr, lse_ptr, q_smem, k_smem, v_smem, sink_k_smem, sink_v_smem, bars,
                sinks_ptr, tiles_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale_log2, num_sink,
                window_size, stride_ob, stride_ot, stride_oh, num_q, num_k, num_heads,
                num_blocks, num_tiles, heads_together, GROUP, HAS_SINK_KEYS, HAS_SINKS,
                STORE_LSE, VARLEN, PAIRED, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_N, BLOCK_S,
                HOLD_Q, STAGES, 1,
            )),
            (load_partition, (
                q_desc, k_desc, v_desc, sink_k_desc, sink_v_desc, q_smem, k_smem, v_smem,
                sink_k_smem, sink_v_smem, bars, tiles_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                window_size, q_batch_rows, k_batch_rows, v_batch_rows, q_head_cols,
                k_head_cols, v_head_cols, num_q, num_k, num_heads, num_blocks, num_tiles,
                heads_together, GROUP, HAS_SINK_KEYS, VARLEN, PAIRED, CAUSAL, WINDOWED,
                BLOCK_N, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

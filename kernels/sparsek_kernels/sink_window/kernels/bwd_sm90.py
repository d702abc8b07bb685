"""Fused backward kernel for Hopper: dk, dv and dq in one pass over the scores (Gluon).

The maths stands in ``bwd.py``; here scores and probabilities are computed once, with five matrix
products per tile instead of seven.  A program owns ``BLOCK_N`` keys of one KV head, keeps
``dk`` and ``dv`` in registers and walks the query blocks of the whole GQA group whose window meets
its keys.  Its share of ``dq`` is added to an fp32 accumulator in memory by the copy engine.

The additions to one query block happen in a fixed order of key blocks: a program adds only once the
block before it has announced its own addition in ``order``, so results are bitwise reproducible.
Programs take their key block from a ticket counter in the same order, so whoever is waited for has
always started.

None should have to wait long.  With a window key blocks descend and query blocks ascend: a program
reaches a query block just after its predecessor did.  Without one key blocks ascend, so that the
longest loops start first, and query blocks descend: all loops begin with the last one, while
ascending ones would wait for their predecessors to come to where they begin.  Where a key stands
for many tokens, loops are cut into segments of queries: programs of one length, side by side at
the same queries, which the L2 cache then holds.  Each segment has ``dk`` and ``dv`` of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import thread_barrier
from sparsek_kernels.common.kernels.masks import last_key, visible
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.sink_window.kernels.bwd_memory_sm90 import (
    add_partition,
    load_partition,
    place_step,
    place_task,
)


@gluon.jit
def _zero_tail(buffer, num_valid, HELD: gl.constexpr, COLS: gl.constexpr):
    """Clear rows from ``num_valid`` on: they may hold NaN of a neighbouring sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [8, 1], [1, 0])
    row = gl.arange(0, HELD, gl.SliceLayout(1, LAYOUT))
    held = buffer.load(LAYOUT)
    buffer.store(gl.where((row < num_valid)[:, None], held, gl.zeros_like(held)))


@gluon.jit
def _compute_partition(
    dk_ptr, dv_ptr, term_dk_ptr, term_dv_ptr, sink_dk_ptr, sink_dv_ptr, slots_ptr,
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, lse_smem, delta_smem, kv_full, q_full,
    q_empty, g_full, g_empty, dq_full, dq_empty,
    seq, batch, kv_head, block, q_len, k_start, k_len, start, m_left, m_full, m_all, scale,
    num_sink, window_size,
    stride_dkb, stride_dkt, stride_dkh,
    stride_tb, stride_tt, stride_th,
    num_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    HAS_SINK_KEYS: gl.constexpr, HAS_TERMS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr,
    KEY_BLOCK: gl.constexpr, KEY_STRIDE: gl.constexpr,
):  # fmt: skip
    """Two warpgroups, 64 keys each: transposed scores, their gradients, and four products."""
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    Q_WARPS: gl.constexpr = BLOCK_M // 16
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [Q_WARPS, 8 // Q_WARPS], [16, HEAD_DIM * Q_WARPS // 8, 16]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, KV_LAYOUT, 2)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [8, 1], [1, 0]
    )
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    offset = k_len - q_len if KEY_BLOCK == 1 else q_len * 0
    n_first = block * BLOCK_N
    key = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, S_LAYOUT))
    dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, KV_LAYOUT)
    dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, KV_LAYOUT)
    zero_s = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, DQ_LAYOUT)
    scale_log2 = scale * LOG2E
    steps = GROUP * m_all
    s = zero_s
    dk_token = warpgroup_mma_init(dk)
    if steps > 0:
        mbarrier.wait(kv_full, 0)
        if n_first + BLOCK_N > k_len:
            _zero_tail(k_smem, k_len - n_first, BLOCK_N, HEAD_DIM)
            _zero_tail(v_smem, k_len - n_first, BLOCK_N, HEAD_DIM)
            fence_async_shared()
            thread_barrier()
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma(k_smem, q_smem.index(0).permute((1, 0)), zero_s, use_acc=False)
    for step in range(steps):
        # In flight: dk of the step before.
        q_stage = step % Q_STAGES
        g_stage = step % G_STAGES
        _, m_block = place_step(step, m_all, GROUP, WINDOWED)
        row_first = start + m_block * BLOCK_M
        mbarrier.wait(g_full.index(g_stage), (step // G_STAGES) & 1)
        if row_first + BLOCK_M > q_len:
            _zero_tail(q_smem.index(q_stage), q_len - row_first, BLOCK_M, HEAD_DIM)
            _zero_tail(dout_smem.index(g_stage), q_len - row_first, BLOCK_M, HEAD_DIM)
            fence_async_shared()
            thread_barrier()
        dp_token = warpgroup_mma(
            v_smem, dout_smem.index(g_stage).permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
        lse = lse_smem.index(g_stage).load(COL_LAYOUT)
        p = gl.exp2(s * scale_log2 - lse[None, :])  # [BLOCK_N, BLOCK_M]
        # Keys past the end count as zeros: unmasked, exp2(-lse) of them may overflow to inf * 0.
        if (m_block < m_left) | (m_block >= m_full) | (n_first + BLOCK_N > k_len):
            row = row_first + gl.arange(0, BLOCK_M, COL_LAYOUT)
            pos = last_key(row + offset, KEY_BLOCK, KEY_STRIDE)
            seen = visible(pos[None, :], key[:, None], 0, window_size, CAUSAL, WINDOWED, False)
            p = gl.where(seen & (row < q_len)[None, :] & (key < k_len)[:, None], p, 0.0)
        p_half = gl.convert_layout(p.to(dtype), P_LAYOUT)
        dv_token = warpgroup_mma(p_half, dout_smem.index(g_stage), dv, is_async=True)
        delta = delta_smem.index(g_stage).load(COL_LAYOUT)
        dk, dp = warpgroup_mma_wait(1, deps=[dk_token, dp_token])
        if step > 0:
            mbarrier.arrive(q_empty.index((step - 1) % Q_STAGES), count=1)
        ds_smem.store((p * (dp - delta[None, :])).to(dtype))  # [BLOCK_N, BLOCK_M]
        fence_async_shared()
        thread_barrier()
        dq_token = warpgroup_mma(
            ds_smem.permute((1, 0)), k_smem, zero_q, use_acc=False, is_async=True
        )
        after = gl.minimum(step + 1, steps - 1)
        mbarrier.wait(q_full.index(after % Q_STAGES), (after // Q_STAGES) & 1)
        s_token = warpgroup_mma(
            k_smem, q_smem.index(after % Q_STAGES).permute((1, 0)), s, use_acc=False,
            is_async=True,
        )  # fmt: skip
        dk_token = warpgroup_mma(ds_smem, q_smem.index(q_stage), dk, is_async=True)
        dv, p_half, dq = warpgroup_mma_wait(2, deps=[dv_token, p_half, dq_token])
        mbarrier.arrive(g_empty.index(g_stage), count=1)
        mbarrier.wait(dq_empty, (step & 1) ^ 1)
        dq_smem.store(dq)
        fence_async_shared()
        mbarrier.arrive(dq_full, count=1)
        s = warpgroup_mma_wait(1, deps=[s_token])

    dk = warpgroup_mma_wait(0, deps=[dk_token])
    if n_first < k_len:
        kv_key = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, KV_LAYOUT))
        kv_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, KV_LAYOUT))
        if HAS_SINK_KEYS and n_first < num_sink:
            sink_head = seq.to(gl.int64) * (num_heads // GROUP) + kv_head
            sink_row = (sink_head * num_sink + kv_key)[:, None] * HEAD_DIM + kv_col[None, :]
            mask_sink = (kv_key < gl.minimum(num_sink, k_len))[:, None]
            dk += gl.load(sink_dk_ptr + sink_row, mask=mask_sink, other=0.0)
            dv += gl.load(sink_dv_ptr + sink_row, mask=mask_sink, other=0.0)
        dk *= scale
        if HAS_TERMS:
            slot = gl.load(slots_ptr + k_start + kv_key, mask=kv_key < k_len, other=-1)
            term_base = batch.to(gl.int64) * stride_tb + kv_head.to(gl.int64) * stride_th
            term_row = slot.to(gl.int64)[:, None] * stride_tt + kv_col[None, :]
            mask_term = (slot >= 0)[:, None]
            gl.store(term_dk_ptr + term_base + term_row, dk, mask=mask_term)
            gl.store(term_dv_ptr + term_base + term_row, dv, mask=mask_term)
        # k and v are no longer needed: their buffers turn the rows around for wide stores.
        thread_barrier()
        k_smem.store(dk.to(dtype))
        v_smem.store(dv.to(dtype))
        thread_barrier()
        out_key = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORE_LAYOUT))
        col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORE_LAYOUT))
        base = batch.to(gl.int64) * stride_dkb + kv_head.to(gl.int64) * stride_dkh
        out_row = (k_start + out_key).to(gl.int64)[:, None] * stride_dkt + col[None, :]
        mask = (out_key < k_len)[:, None]
        gl.store(dk_ptr + base + out_row, k_smem.load(STORE_LAYOUT), mask=mask)
        gl.store(dv_ptr + base + out_row, v_smem.load(STORE_LAYOUT), mask=mask)


@gluon.jit
def sink_window_hopper_bwd_kernel(
    dk_ptr, dv_ptr, term_dk_ptr, term_dv_ptr, order_ptr, ticket_ptr, dq_desc, q_desc, dout_desc,
    k_desc, v_desc, lse_ptr, delta_ptr, sink_dk_ptr, sink_dv_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, tiles_ptr, slots_ptr,
    scale, num_sink, window_size,
    stride_dkb, stride_dkt, stride_dkh,
    stride_tb, stride_tt, stride_th,
    q_batch_rows, g_batch_rows, k_batch_rows, v_batch_rows,
    q_head_cols, g_head_cols, k_head_cols, v_head_cols,
    num_q, num_k, num_heads, num_blocks, order_blocks, heads_together, num_segments, segment_rows,
    stride_dks,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    HAS_SINK_KEYS: gl.constexpr, HAS_TERMS: gl.constexpr, VARLEN: gl.constexpr,
    OVERWRITES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr, KEY_BLOCK: gl.constexpr = 1,
    KEY_STRIDE: gl.constexpr = 1,
):  # fmt: skip
    """Grid: one program per key block, segment, KV head and sequence.

    ``*_desc`` describe q, dout, k and v as matrices ``[tokens, heads * D]``, and the fp32 ``dq``
    accumulator ``[B, Hq, N, D]`` as ``[B * Hq * N, D]``.  ``dk`` and ``dv`` share their strides;
    the next segment's start ``stride_dks`` elements on.  ``OVERWRITES``: the first tile that a
    query block gets replaces what ``dq`` held.  ``HAS_TERMS`` as in the portable kernel.
    With ``KEY_BLOCK`` above 1 keys stand for blocks of tokens (:func:`last_key`), and the first
    query is at token 0.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK_M, HEAD_DIM], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(dtype, [G_STAGES, BLOCK_M, HEAD_DIM], dout_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], v_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M, HEAD_DIM], dq_desc.layout)
    ROW_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [G_STAGES, BLOCK_M], ROW_LAYOUT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [G_STAGES, BLOCK_M], ROW_LAYOUT)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    dq_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_full, q_empty = ring_barriers(Q_STAGES, 1, 1)
    g_full, g_empty = ring_barriers(G_STAGES, 2, 1)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    task = gl.atomic_add(ticket_ptr, 1)
    # The ticket reaches the other warps through shared memory that the fork below writes again.
    thread_barrier()
    (
        seq, batch, kv_head, block, segment, q_start, q_len, k_start, k_len, start, m_left, m_full,
        m_all,
    ) = place_task(
        task, tiles_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_q, num_k, num_heads, num_blocks,
        heads_together, num_segments, segment_rows, window_size, GROUP, VARLEN, CAUSAL, WINDOWED,
        BLOCK_M, BLOCK_N, KEY_BLOCK, KEY_STRIDE,
    )  # fmt: skip
    dk_ptr += segment.to(gl.int64) * stride_dks
    dv_ptr += segment.to(gl.int64) * stride_dks
    gl.warp_specialize(
        [
            (_compute_partition, (
                dk_ptr, dv_ptr, term_dk_ptr, term_dv_ptr, sink_dk_ptr, sink_dv_ptr, slots_ptr,
                q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, lse_smem, delta_smem,
                kv_full, q_full, q_empty, g_full, g_empty, dq_full, dq_empty, seq, batch,
                kv_head, block, q_len, k_start, k_len, start, m_left, m_full, m_all, scale,
                num_sink, window_size, stride_dkb, stride_dkt, stride_dkh, stride_tb, stride_tt,
                stride_th, num_heads,
                GROUP, HEAD_DIM, CAUSAL, WINDOWED, HAS_SINK_KEYS, HAS_TERMS, BLOCK_M, BLOCK_N,
                Q_STAGES, G_STAGES, KEY_BLOCK, KEY_STRIDE,
            )),
            (load_partition, (
                q_desc, dout_desc, k_desc, v_desc, lse_ptr, delta_ptr, q_smem, dout_smem,
                k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty, g_full,
                g_empty, batch, kv_head, block, q_start, q_len, k_start, start, m_all,
                q_batch_rows, g_batch_rows, k_batch_rows, v_batch_rows, q_head_cols,
                g_head_cols,
                k_head_cols, v_head_cols, num_q, num_heads,
                GROUP, WINDOWED, BLOCK_M, BLOCK_N, Q_STAGES, G_STAGES,
            )),
            (add_partition, (
                dq_desc, dq_smem, dq_full, dq_empty, order_ptr, seq, batch, kv_head, block,
                q_start, q_len, k_len, start, m_all, order_blocks, num_q,
                num_heads, GROUP, VARLEN, WINDOWED, OVERWRITES, BLOCK_M, BLOCK_N,
            )),
        ],
        [1, 1], [24, 24],
    )  # fmt: skip

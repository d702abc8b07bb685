"""Tasks of the Hopper backward kernel, and the warps that load and add for it (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparsek_kernels.common.kernels.gluon_names import tma_load, tma_store
from sparsek_kernels.common.kernels.masks import window_query_blocks
from sparsek_kernels.common.kernels.sequences import sequence_bounds
from sparsek_kernels.common.kernels.softmax import LOG2E


@builtin
def tma_add(tensor_desc, coord, src, _semantic=None):
    """Add a shared-memory tile to a descriptor's tensor with the copy engine."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@gluon.jit
def load_flag(ptr):
    """Read the value that :func:`store_flag` announced.

    The copies that it speaks of are complete in the L2 cache, and those that wait for it are made
    there: no fence between proxies is needed on the way.
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_flag(ptr, value):
    """Wait for this warp's copies to be complete in memory, then announce ``value``."""
    return gl.inline_asm_elementwise(
        """cp.async.bulk.wait_group 0;
        st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, $2;""",
        "=r,l,r",
        [ptr.to(gl.int64), value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def place_task(
    task,
    tiles_ptr, cu_q_ptr, cu_k_ptr,
    num_q, num_k, num_heads, num_blocks, heads_together, num_segments, segment_rows, window_size,
    GROUP: gl.constexpr, VARLEN: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, KEY_BLOCK: gl.constexpr, KEY_STRIDE: gl.constexpr,
):  # fmt: skip
    """Sequence, KV head, key block, segment and query blocks of a task.

    ``heads_together`` KV heads run side by side: fastest, then key blocks, then segments, then the
    other heads.  A segment is ``segment_rows`` queries, a multiple of ``BLOCK_M``; with a window
    there is only one.
    """
    lane = task % heads_together
    rest = task // heads_together
    block = rest % num_blocks
    rest = rest // num_blocks
    segment = rest * 0
    if WINDOWED:
        block = num_blocks - 1 - block
    else:
        segment = num_segments - 1 - rest % num_segments
        rest = rest // num_segments
    rest = rest * heads_together + lane
    kv_head = rest % (num_heads // GROUP)
    seq = rest // (num_heads // GROUP)
    if VARLEN:
        slot = block.to(gl.int64) * 2
        seq = gl.load(tiles_ptr + slot)
        block = gl.load(tiles_ptr + slot + 1)
    valid = seq >= 0
    seq = gl.maximum(seq, 0)
    batch, q_start, q_len, k_start, k_len = sequence_bounds(
        seq, cu_q_ptr, cu_k_ptr, num_q, num_k, VARLEN
    )
    if VARLEN:
        # A tile beyond the last sequence owns no keys, and so stores no gradients.
        k_len = gl.where(valid, k_len, 0)
    n_first = block * BLOCK_N
    n_last = gl.minimum(n_first + BLOCK_N, k_len) - 1
    # In tokens: the last one that a key stands for.
    start, m_left, m_full, m_all = window_query_blocks(
        n_first * KEY_STRIDE + KEY_BLOCK - 1, n_last * KEY_STRIDE + KEY_BLOCK - 1, q_len,
        k_len if KEY_BLOCK == 1 else q_len, window_size, BLOCK_M, BLOCK_M, CAUSAL, WINDOWED,
    )  # fmt: skip
    if not WINDOWED:
        first = gl.maximum(start, segment * segment_rows)
        end = gl.minimum(start + m_all * BLOCK_M, (segment + 1) * segment_rows)
        skipped = (first - start) // BLOCK_M
        m_left -= skipped
        m_full -= skipped
        m_all = gl.maximum(end - first, 0) // BLOCK_M
        start = first
    m_all = gl.where(valid, m_all, 0)
    return (
        seq, batch, kv_head, block, segment, q_start, q_len, k_start, k_len, start, m_left, m_full,
        m_all,
    )  # fmt: skip


@gluon.jit
def place_step(step, m_all, GROUP: gl.constexpr, WINDOWED: gl.constexpr):
    """Query head of the group and query block of a step."""
    if WINDOWED:
        return step // m_all, step % m_all
    else:
        return step % GROUP, m_all - 1 - step // GROUP


@gluon.jit
def load_partition(
    q_desc, dout_desc, k_desc, v_desc, lse_ptr, delta_ptr,
    q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty, g_full,
    g_empty,
    batch, kv_head, block, q_start, q_len, k_start, start, m_all,
    q_batch_rows, g_batch_rows, k_batch_rows, v_batch_rows,
    q_head_cols, g_head_cols, k_head_cols, v_head_cols,
    num_q, num_heads,
    GROUP: gl.constexpr, WINDOWED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr,
):  # fmt: skip
    """Issue the loads: k and v once, then q, dout, lse and delta of each query block."""
    if m_all > 0:
        key = k_start + block * BLOCK_N
        mbarrier.expect(kv_full, 2 * k_desc.block_type.nbytes)
        tma_load(k_desc, [batch * k_batch_rows + key, kv_head * k_head_cols], kv_full, k_smem)
        tma_load(v_desc, [batch * v_batch_rows + key, kv_head * v_head_cols], kv_full, v_smem)
    LANES: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    for step in range(GROUP * m_all):
        member, m_block = place_step(step, m_all, GROUP, WINDOWED)
        head = kv_head * GROUP + member
        first = start + m_block * BLOCK_M
        row = q_start + first
        stage = step % Q_STAGES
        mbarrier.wait(q_empty.index(stage), ((step // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        tma_load(
            q_desc, [batch * q_batch_rows + row, head * q_head_cols], q_full.index(stage),
            q_smem.index(stage),
        )  # fmt: skip
        stage = step % G_STAGES
        mbarrier.wait(g_empty.index(stage), ((step // G_STAGES) & 1) ^ 1)
        mbarrier.expect(g_full.index(stage), dout_desc.block_type.nbytes)
        tma_load(
            dout_desc, [batch * g_batch_rows + row, head * g_head_cols], g_full.index(stage),
            dout_smem.index(stage),
        )  # fmt: skip
        offs = gl.arange(0, BLOCK_M, LANES)
        flat = (batch.to(gl.int64) * num_heads + head) * num_q + row + offs
        lse = gl.load(lse_ptr + flat, mask=first + offs < q_len, other=0.0)
        delta = gl.load(delta_ptr + flat, mask=first + offs < q_len, other=0.0)
        lse_smem.index(stage).store(lse * LOG2E)
        delta_smem.index(stage).store(delta)
        mbarrier.arrive(g_full.index(stage), count=1)


@gluon.jit
def add_partition(
    dq_desc,
    dq_smem, dq_full, dq_empty,
    order_ptr,
    seq, batch, kv_head, block, q_start, q_len, k_len, start, m_all, order_blocks, num_q, num_heads,
    GROUP: gl.constexpr, VARLEN: gl.constexpr, WINDOWED: gl.constexpr, OVERWRITES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Add each ``dq`` tile to memory when its turn has come; the first may overwrite."""
    offset = k_len - q_len
    for step in range(GROUP * m_all):
        member, m_block = place_step(step, m_all, GROUP, WINDOWED)
        head = batch * num_heads + kv_head * GROUP + member
        row = start + m_block * BLOCK_M
        flag = head.to(gl.int64) * order_blocks + row // BLOCK_M
        if VARLEN:
            flag += q_start // BLOCK_M + seq
        if WINDOWED:
            # Blocks add from the last that these rows see to the first.
            last_block = (gl.minimum(row + BLOCK_M, q_len) - 1 + offset) // BLOCK_N
            turn = last_block - block
        else:
            turn = block
        mbarrier.wait(dq_full, step & 1)
        if turn > 0:
            seen = load_flag(order_ptr + flag)
            while seen != turn:
                seen = load_flag(order_ptr + flag)
        place = [head * num_q + q_start + row, 0]
        if OVERWRITES and turn == 0:
            tma_store(dq_desc, place, dq_smem)
        else:
            tma_add(dq_desc, place, dq_smem)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty, count=1)
        store_flag(order_ptr + flag, turn + 1)

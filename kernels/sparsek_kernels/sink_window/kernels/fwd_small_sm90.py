"""Forward kernel for problems that take a few microseconds on Hopper (Gluon).

``fwd.py`` explains the maths; there is no window here.  All programs run at once, so the kernel
takes as long as one program.  Two warpgroups attend to half of the keys each, and the halves are
joined in shared memory:

    lse = log sum_s exp(lse_s),   out = sum_s exp(lse_s - lse) out_s

All loads are issued at once, in the order of their use.  The kernel may be started before the one
ahead of it in the stream has ended (programmatic dependent launch): it waits before it touches
memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.gluon_names import async_load, thread_barrier
from sparsek_kernels.common.kernels.softmax import LN2, LOG2E

ROWS: gl.constexpr = gl.constexpr(64)
SPLITS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def _start_next_kernel():
    """Let the next kernel of the stream start; it waits in turn before it touches memory."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_kernel_before():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_copy(LATER: gl.constexpr):
    """Wait until all but the ``LATER`` last copies have arrived, and show them to tensor cores."""
    async_copy.wait_group(LATER)
    fence_async_shared()


@gluon.jit
def _split_partition(
    pointers, buffers, strides, sizes, scale_log2,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr,
    STORE_LSE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: ``CHUNKS`` blocks of keys, then an equal share of the joined rows."""
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr = pointers
    q_smem, k_smem, v_smem, part_smem, max_smem, sum_smem, q_full, parts_full = buffers
    octet_ob, octet_ot, octet_oh = strides[:3]
    octet_qb, octet_qt, octet_qh, octet_kb, octet_kt, octet_kh = strides[3:9]
    octet_vb, octet_vt, octet_vh = strides[9:]
    num_q, num_k, num_heads = sizes
    dtype: gl.constexpr = q_smem.dtype
    SHARE: gl.constexpr = ROWS // SPLITS
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    first_row = gl.program_id(0) * ROWS
    head = gl.program_id(1)
    batch = gl.program_id(2).to(gl.int64)
    kv_head = head // GROUP
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]

    row = first_row + INDEX * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, WIDE))
    q_base = q_ptr + (batch * octet_qb + head.to(gl.int64) * octet_qh) * 8
    q_offs = row.to(gl.int64)[:, None] * octet_qt * 8 + col
    first_key = INDEX * CHUNKS * BLOCK_N
    key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    k_base = k_ptr + (batch * octet_kb + kv_head.to(gl.int64) * octet_kh) * 8
    k_ptrs = k_base + key.to(gl.int64)[:, None] * octet_kt * 8 + col
    v_base = v_ptr + (batch * octet_vb + kv_head.to(gl.int64) * octet_vh) * 8
    v_ptrs = v_base + key.to(gl.int64)[:, None] * octet_vt * 8 + col
    k_step = octet_kt.to(gl.int64) * (8 * BLOCK_N)
    v_step = octet_vt.to(gl.int64) * (8 * BLOCK_N)
    _wait_for_kernel_before()
    async_load(q_smem.slice(INDEX * SHARE, SHARE), q_base + q_offs, mask=(row < num_q)[:, None])
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    # In the order of use: k_0, k_1, v_0, k_2, v_1, .. v_last.
    for c in gl.static_range(CHUNKS + 1):
        if c < CHUNKS:
            async_load(
                k_smem.index(INDEX * CHUNKS + c),
                k_ptrs + c * k_step,
                mask=(key + c * BLOCK_N < num_k)[:, None],
            )
            async_copy.commit_group()
        if c > 0:
            async_load(
                v_smem.index(INDEX * CHUNKS + c - 1),
                v_ptrs + (c - 1) * v_step,
                mask=(key + (c - 1) * BLOCK_N < num_k)[:, None],
            )
            async_copy.commit_group()

    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    acc_token = warpgroup_mma_init(acc)
    p_before = gl.zeros([ROWS, BLOCK_N], dtype, P_LAYOUT)
    zero_s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full, 0)
    _wait_for_copy(2 * CHUNKS - 1)
    s_next = warpgroup_mma(
        q_smem, k_smem.index(INDEX * CHUNKS).permute((1, 0)), zero_s, use_acc=False, is_async=True
    )
    for c in gl.static_range(CHUNKS):
        s_token = s_next
        if c + 1 < CHUNKS:
            _wait_for_copy(2 * CHUNKS - 2 - 2 * c)
            s_next = warpgroup_mma(
                q_smem, k_smem.index(INDEX * CHUNKS + c + 1).permute((1, 0)), zero_s,
                use_acc=False, is_async=True,
            )  # fmt: skip
        s = warpgroup_mma_wait(min(c, 1) + min(CHUNKS - 1 - c, 1), deps=[s_token])
        seen_key = first_key + c * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        if CAUSAL:
            at = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT)) + (num_k - num_q)
            s = gl.where(seen_key[None, :] <= at[:, None], s, float("-inf"))
        elif num_k < BLOCK_N * CHUNKS * SPLITS:
            s = gl.where((seen_key < num_k)[None, :], s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # [ROWS]
        m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * scale_log2 - m_ref[:, None])  # [ROWS, BLOCK_N]
        p_half = gl.convert_layout(p.to(dtype), P_LAYOUT)
        if c > 0:
            alpha = gl.exp2(m - m_ref)
            acc, p_before = warpgroup_mma_wait(min(CHUNKS - 1 - c, 1), deps=[acc_token, p_before])
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            total = total * alpha
        _wait_for_copy(2 * CHUNKS - 3 - 2 * c if c + 1 < CHUNKS else 0)
        acc_token = warpgroup_mma(
            p_half, v_smem.index(INDEX * CHUNKS + c), acc, use_acc=c > 0, is_async=True
        )
        p_before = p_half
        total += gl.sum(p, 1)
        m = m_new
    max_smem.index(INDEX).store(m)
    sum_smem.index(INDEX).store(total)
    acc, p_before = warpgroup_mma_wait(0, deps=[acc_token, p_before])
    part_smem.index(INDEX).store(acc)
    thread_barrier()
    mbarrier.arrive(parts_full, count=1)
    mbarrier.wait(parts_full, 0)

    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, WIDE)
    if HAS_SINKS:
        logit = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
        top = gl.full([SHARE], 0.0, gl.float32, ROW_LAYOUT) + logit
    else:
        top = gl.full([SHARE], float("-inf"), gl.float32, ROW_LAYOUT)
    for i in gl.static_range(SPLITS):
        top = gl.maximum(top, max_smem.index(i).slice(INDEX * SHARE, SHARE).load(ROW_LAYOUT))
    top_ref = gl.where(top == float("-inf"), 0.0, top)
    total = gl.zeros([SHARE], gl.float32, ROW_LAYOUT)
    if HAS_SINKS:
        total = gl.exp2(logit - top_ref)
    joined = gl.zeros([SHARE, HEAD_DIM], gl.float32, WIDE)
    for i in gl.static_range(SPLITS):
        weight = gl.exp2(max_smem.index(i).slice(INDEX * SHARE, SHARE).load(ROW_LAYOUT) - top_ref)
        total += weight * sum_smem.index(i).slice(INDEX * SHARE, SHARE).load(ROW_LAYOUT)
        joined += weight[:, None] * part_smem.index(i).slice(INDEX * SHARE, SHARE).load(WIDE)
    empty = total == 0.0
    joined = joined * (1.0 / gl.where(empty, 1.0, total))[:, None]
    out_base = out_ptr + (batch * octet_ob + head.to(gl.int64) * octet_oh) * 8
    gl.store(
        out_base + row.to(gl.int64)[:, None] * octet_ot * 8 + col,
        joined.to(out_ptr.dtype.element_ty),
        mask=(row < num_q)[:, None],
    )
    if STORE_LSE:
        lse = gl.where(empty, float("-inf"), (top + gl.log2(total)) * LN2)
        gl.store(lse_ptr + (batch * num_heads + head) * num_q + row, lse, mask=row < num_q)


@gluon.jit
def sink_window_hopper_small_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr,
    scale_log2,
    octet_ob, octet_ot, octet_oh,
    octet_qb, octet_qt, octet_qh,
    octet_kb, octet_kt, octet_kh,
    octet_vb, octet_vt, octet_vh,
    num_q, num_k, num_heads,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr,
    STORE_LSE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Grid ``(query blocks, heads, batch)``: 64 query rows and up to ``SPLITS * CHUNKS * BLOCK_N``
    keys.

    ``octet_*`` are strides in units of 8 elements, as many as one copy moves.
    """
    _start_next_kernel()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    PART_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [SPLITS * CHUNKS, BLOCK_N, HEAD_DIM], KV_LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [SPLITS * CHUNKS, BLOCK_N, HEAD_DIM], KV_LAYOUT)
    part_smem = gl.allocate_shared_memory(gl.float32, [SPLITS, ROWS, HEAD_DIM], PART_LAYOUT)
    max_smem = gl.allocate_shared_memory(gl.float32, [SPLITS, ROWS], LINE)
    sum_smem = gl.allocate_shared_memory(gl.float32, [SPLITS, ROWS], LINE)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    parts_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128 * SPLITS)
    mbarrier.init(parts_full, count=SPLITS)
    pointers = (out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr)
    buffers = (q_smem, k_smem, v_smem, part_smem, max_smem, sum_smem, q_full, parts_full)
    strides = (
        octet_ob, octet_ot, octet_oh, octet_qb, octet_qt, octet_qh,
        octet_kb, octet_kt, octet_kh, octet_vb, octet_vt, octet_vh,
    )  # fmt: skip
    sizes = (num_q, num_k, num_heads)
    gl.warp_specialize(
        [
            (_split_partition, (
                pointers, buffers, strides, sizes, scale_log2, GROUP, HEAD_DIM, CAUSAL,
                HAS_SINKS, STORE_LSE, BLOCK_N, CHUNKS, 0,
            )),
            (_split_partition, (
                pointers, buffers, strides, sizes, scale_log2, GROUP, HEAD_DIM, CAUSAL,
                HAS_SINKS, STORE_LSE, BLOCK_N, CHUNKS, 1,
            )),
        ],
        [4], [240],
    )  # fmt: skip

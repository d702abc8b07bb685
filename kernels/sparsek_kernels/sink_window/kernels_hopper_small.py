"""Forward kernel for small problems on Hopper: latency is all that counts (Gluon).

The maths is that of :mod:`kernels_fwd`.  Every key of the sequence is requested at once; two
warpgroups then take 64 query rows each against one half of the keys, in a single step without an
online softmax, and merge their halves through shared memory:

    m = max(m_0, m_1),  out = sum_i exp(m_i - m) acc_i / sum_i exp(m_i - m) l_i
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from sparsek_kernels.common.masks import visible

ROWS: gl.constexpr = gl.constexpr(64)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def _copy_rows(smem, base, first, limit, stride_t, COUNT: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start copying ``COUNT`` rows from row ``first`` on; rows past ``limit`` become zeros."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    row = first + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    ptrs = base + row.to(gl.int64)[:, None] * stride_t + col[None, :]
    async_copy.async_copy_global_to_shared(smem, ptrs, mask=(row < limit)[:, None])
    async_copy.commit_group()


@gluon.jit
def _half(
    q_base,
    k_base,
    v_base,
    q_smem,
    k_smem,
    v_smem,
    row_first,
    scale_log2,
    num_sink,
    window_size,
    stride_qt,
    stride_kt,
    stride_vt,
    num_q,
    num_k,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    EVEN: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Unnormalised output, row maximum and row sum over keys ``INDEX * KEYS ..``."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    _copy_rows(q_smem, q_base, row_first, num_q, stride_qt, ROWS, HEAD_DIM)
    _copy_rows(k_smem, k_base, INDEX * KEYS, num_k, stride_kt, KEYS, HEAD_DIM)
    _copy_rows(v_smem, v_base, INDEX * KEYS, num_k, stride_vt, KEYS, HEAD_DIM)
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False)
    if not EVEN:
        key = INDEX * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
        row = row_first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        pos = row + (num_k - num_q)
        seen = (key < num_k)[None, :] & visible(
            pos[:, None], key[None, :], num_sink, window_size, CAUSAL, WINDOWED, True
        )
        s = gl.where(seen, s, float("-inf"))
    m = gl.max(s, 1) * scale_log2  # [ROWS]
    m_ref = m
    if not EVEN:
        m_ref = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(s * scale_log2 - m_ref[:, None])  # [ROWS, KEYS]
    total = gl.sum(p, 1)  # [ROWS]
    weights = gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    zero_o = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    acc = warpgroup_mma(weights, v_smem, zero_o, use_acc=False)
    row_layout: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    return acc, gl.convert_layout(m, row_layout), gl.convert_layout(total, row_layout)


@gluon.jit
def _second_partition(
    q_base,
    k_base,
    v_base,
    q_smem,
    k_smem,
    v_smem,
    acc_smem,
    m_smem,
    total_smem,
    ready,
    row_first,
    scale_log2,
    num_sink,
    window_size,
    stride_qt,
    stride_kt,
    stride_vt,
    num_q,
    num_k,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    EVEN: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr,
):
    """The later half of the keys, handed over through shared memory."""
    acc, m, total = _half(
        q_base, k_base, v_base, q_smem, k_smem, v_smem, row_first, scale_log2, num_sink,
        window_size, stride_qt, stride_kt, stride_vt, num_q, num_k,
        CAUSAL, WINDOWED, EVEN, HEAD_DIM, KEYS, 1,
    )  # fmt: skip
    acc_smem.store(acc)
    m_smem.store(m)
    total_smem.store(total)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _first_partition(
    out_base,
    lse_base,
    sink_logit,
    q_base,
    k_base,
    v_base,
    q_smem,
    k_smem,
    v_smem,
    acc_smem,
    m_smem,
    total_smem,
    ready,
    row_first,
    scale_log2,
    num_sink,
    window_size,
    stride_ot,
    stride_qt,
    stride_kt,
    stride_vt,
    num_q,
    num_k,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    STORE_LSE: gl.constexpr,
    EVEN: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr,
):
    """The earlier half of the keys, the merge and the output."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    acc, m, total = _half(
        q_base, k_base, v_base, q_smem, k_smem, v_smem, row_first, scale_log2, num_sink,
        window_size, stride_qt, stride_kt, stride_vt, num_q, num_k,
        CAUSAL, WINDOWED, EVEN, HEAD_DIM, KEYS, 0,
    )  # fmt: skip
    mbarrier.wait(ready, 0)
    other_m = m_smem.load(ROW_LAYOUT)
    m_both = gl.maximum(m, other_m)
    if HAS_SINKS:
        m_both = gl.maximum(m_both, sink_logit)
    m_ref = gl.where(m_both == float("-inf"), 0.0, m_both)
    mine = gl.exp2(m - m_ref)
    other = gl.exp2(other_m - m_ref)
    total = total * mine + total_smem.load(ROW_LAYOUT) * other
    if HAS_SINKS:
        total += gl.exp2(sink_logit - m_ref)
    inv = 1.0 / gl.where(total > 0.0, total, 1.0)
    acc = acc * (mine * inv)[:, None] + acc_smem.load(O_LAYOUT) * (other * inv)[:, None]
    row = row_first + gl.arange(0, ROWS, ROW_LAYOUT)
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
    ptrs = out_base + row.to(gl.int64)[:, None] * stride_ot + col[None, :]
    gl.store(ptrs, acc.to(out_base.dtype.element_ty), mask=(row < num_q)[:, None])
    if STORE_LSE:
        lse = gl.where(total > 0.0, (m_both + gl.log2(total)) * LN_2, float("-inf"))
        gl.store(lse_base + row, lse, mask=row < num_q)


@gluon.jit
def sink_window_hopper_small_fwd_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    scale,
    num_sink,
    window_size,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    num_q,
    num_k,
    num_heads,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    STORE_LSE: gl.constexpr,
    EVEN: gl.constexpr,
    KEYS: gl.constexpr,
):
    """One program: 64 query rows of one head against at most ``2 * KEYS`` keys.

    Grid ``(query blocks, heads, batch)``.  ``EVEN`` promises that every row sees ``2 * KEYS`` keys.
    """
    head = gl.program_id(1)
    batch = gl.program_id(2).to(gl.int64)
    kv_head = (head // GROUP).to(gl.int64)
    row_first = gl.program_id(0) * ROWS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [2, KEYS, HEAD_DIM], LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [2, KEYS, HEAD_DIM], LAYOUT)
    acc_smem = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM], WIDE)
    m_smem = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    total_smem = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    q_base = q_ptr + batch * stride_qb + head.to(gl.int64) * stride_qh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    out_base = out_ptr + batch * stride_ob + head.to(gl.int64) * stride_oh
    lse_base = lse_ptr + (batch * num_heads + head) * num_q
    sink_logit = 0.0
    if HAS_SINKS:
        sink_logit = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
    scale_log2 = scale * LOG2_E
    gl.warp_specialize(
        [
            (
                _first_partition,
                (
                    out_base, lse_base, sink_logit, q_base, k_base, v_base, q_smem.index(0),
                    k_smem.index(0), v_smem.index(0), acc_smem, m_smem, total_smem, ready,
                    row_first, scale_log2, num_sink, window_size, stride_ot, stride_qt, stride_kt,
                    stride_vt, num_q, num_k, CAUSAL, WINDOWED, HAS_SINKS, STORE_LSE, EVEN,
                    HEAD_DIM, KEYS,
                ),
            ),
            (
                _second_partition,
                (
                    q_base, k_base, v_base, q_smem.index(1), k_smem.index(1), v_smem.index(1),
                    acc_smem, m_smem, total_smem, ready, row_first, scale_log2, num_sink,
                    window_size, stride_qt, stride_kt, stride_vt, num_q, num_k, CAUSAL, WINDOWED,
                    EVEN, HEAD_DIM, KEYS,
                ),
            ),
        ],
        [4],
        [256],
    )  # fmt: skip

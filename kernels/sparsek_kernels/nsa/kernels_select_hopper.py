"""Block scores for Hopper (Gluon): one warp loads keys, four warpgroups compute.

The maths and the scratch layout are those of ``nsa_block_scores_kernel``, for selection blocks that
hold a power of two of strides and of which two latest at least need no score.  Each warpgroup has
tokens of its own and none waits for another, so that the products of some overlap the exponentials
of the rest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from sparsek_kernels.nsa.kernels_select import locate_rows

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
WARPGROUPS: gl.constexpr = gl.constexpr(4)


@gluon.jit
def _load_partition(k_desc, k_smem, full, empty, row, col, steps, STAGES: gl.constexpr):
    """Issue the copies of ``steps`` tiles of keys from ``row`` on."""
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [row + step * k_desc.block_type.shape[0], col], full.index(stage),
            k_smem.index(stage),
        )  # fmt: skip


@gluon.jit
def _store_scores(
    scores_ptr,
    s,
    lse,
    mass_smem,
    scale_log2,
    out_row,
    mask_t,
    first_block,
    num_blocks,
    CELLS: gl.constexpr,
    REACH: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_G: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
):
    """Block scores of products ``s [BLOCK_K, BLOCK_G * BLOCK_T]``, own keys and spill apart."""
    BLOCK_K: gl.constexpr = s.shape[0]
    BLOCK_B: gl.constexpr = BLOCK_K // CELLS
    p = gl.exp2(s * scale_log2 - lse[None, :])
    mass = gl.sum(p.reshape([BLOCK_K, BLOCK_G, BLOCK_T]), 1)  # [BLOCK_K, BLOCK_T]
    mass_smem.store(mass.reshape([BLOCK_B, CELLS * BLOCK_T]))
    gl.thread_barrier()
    own = gl.zeros([BLOCK_B, BLOCK_T], gl.float32, OUT_LAYOUT)
    spilled = gl.zeros([BLOCK_B, BLOCK_T], gl.float32, OUT_LAYOUT)
    for cell in gl.static_range(CELLS):
        held = mass_smem.slice(cell * BLOCK_T, BLOCK_T, dim=1).load(OUT_LAYOUT)
        if cell + REACH > CELLS:
            spilled += held * (cell + REACH - CELLS)
            own += held * (CELLS - cell)
        else:
            own += held * REACH
    here = first_block + gl.arange(0, BLOCK_B, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
    out = out_row[None, :] + here
    if REACH > 1:
        gl.store(scores_ptr + 2 * out, own, mask=(here < num_blocks) & mask_t)
        gl.store(scores_ptr + 2 * out + 3, spilled, mask=(here + 1 < num_blocks) & mask_t)
    else:
        gl.store(scores_ptr + out, own, mask=(here < num_blocks) & mask_t)


@gluon.jit
def _compute_partition(
    given,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CELLS: gl.constexpr,
    REACH: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    INDEX: gl.constexpr,
):
    """One warpgroup: ``BLOCK_K`` keys for all heads of ``BLOCK_T`` tokens at a time.

    Rows of q count the heads of a token ``BLOCK_T`` apart, so that a thread holds all of them.
    """
    (
        scores_ptr, lse_ptr, q_base, q_smem, k_smem, mass_smem, full, empty, octet_qt, octet_qh,
        scale, kv_head, row_base, stat_base, out_base, first, num_rows, num_q, num_kv_heads,
        num_blocks, steps,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = BLOCK_T * BLOCK_G
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LANES: gl.constexpr = BLOCK_T if BLOCK_T < 8 else 8
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    q_buf = q_smem.index(INDEX)
    first += INDEX * BLOCK_T
    row_base += INDEX * BLOCK_T
    stat_base += INDEX * BLOCK_T
    out_base += INDEX * BLOCK_T * num_kv_heads.to(gl.int64) * num_blocks
    local = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)) % BLOCK_T
    member = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)) // BLOCK_T
    head = (kv_head * GROUP + member).to(gl.int64)
    at = ((row_base + local).to(gl.int64) * octet_qt + head * octet_qh) * 8
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))[None, :]
    mask = (first + local < num_rows) & (member < GROUP)
    q_buf.store(gl.load(q_base + at[:, None] + col, mask=mask[:, None], other=0.0))
    local = gl.arange(0, ROWS, COL_LAYOUT) % BLOCK_T
    member = gl.arange(0, ROWS, COL_LAYOUT) // BLOCK_T
    stat = stat_base + member.to(gl.int64) * num_q + local
    mask = (first + local < num_rows) & (member < GROUP)
    lse = gl.load(lse_ptr + stat, mask=mask, other=float("inf"))
    lse = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
    scale_log2 = scale * LOG2_E
    zero_s = gl.zeros([BLOCK_K, ROWS], gl.float32, S_LAYOUT)
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, OUT_LAYOUT))
    out_row = out_base + token.to(gl.int64) * (num_kv_heads * num_blocks)
    mask_t = (first + token < num_rows)[None, :]
    BLOCK_B: gl.constexpr = BLOCK_K // CELLS
    fence_async_shared()
    gl.thread_barrier()
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        s = warpgroup_mma(k_smem.index(stage), q_buf.permute((1, 0)), zero_s, use_acc=False)
        mbarrier.arrive(empty.index(stage), count=1)
        _store_scores(
            scores_ptr, s, lse, mass_smem.index(2 * INDEX + step % 2), scale_log2, out_row,
            mask_t, step * BLOCK_B, num_blocks, CELLS, REACH, BLOCK_T, BLOCK_G, OUT_LAYOUT,
        )  # fmt: skip


@gluon.jit
def nsa_block_scores_hopper_kernel(
    scores_ptr,
    q_ptr,
    k_desc,
    lse_ptr,
    cu_rows_ptr,
    cu_seqlens_ptr,
    cu_cmp_ptr,
    tiles_ptr,
    scale,
    octet_qb,
    octet_qt,
    octet_qh,
    k_batch_rows,
    k_head_cols,
    first_row,
    num_rows,
    num_q,
    offset,
    num_heads,
    num_cmp,
    num_blocks,
    Q_LAYOUT: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CMP_BLOCK: gl.constexpr,
    CMP_STRIDE: gl.constexpr,
    SEL_BLOCK: gl.constexpr,
    NUM_LOCAL: gl.constexpr,
    VARLEN: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One program: ``WARPGROUPS * BLOCK_T`` neighbouring tokens of one KV head, the last first.

    ``k_desc`` describes compressed keys as a matrix ``[C, heads * D]``.  Strides of q count groups
    of eight elements.
    """
    CELLS: gl.constexpr = SEL_BLOCK // CMP_STRIDE
    REACH: gl.constexpr = CMP_BLOCK // CMP_STRIDE
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    kv_head = gl.program_id(1)
    seq, tile, batch, q_start, q_len, c_start, _c_len, offset = locate_rows(
        gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(2), tiles_ptr, cu_rows_ptr,
        cu_seqlens_ptr, cu_cmp_ptr, first_row, num_rows, offset, num_cmp, VARLEN,
    )  # fmt: skip
    first = gl.maximum(tile, 0) * (WARPGROUPS * BLOCK_T)
    last = gl.minimum(first + WARPGROUPS * BLOCK_T, q_len) - 1 + offset
    end = gl.where(seq >= 0, last // SEL_BLOCK - NUM_LOCAL + 1, 0)
    q_len = gl.where(seq >= 0, q_len, 0)
    steps = gl.maximum(end * CELLS + BLOCK_K - 1, 0) // BLOCK_K
    wide_batch = batch.to(gl.int64)
    num_kv_heads = gl.num_programs(1)
    row_base = q_start + first
    stat_base = (wide_batch * num_heads + kv_head * GROUP) * num_q + row_base
    out_base = (wide_batch * num_rows + row_base - first_row) * num_kv_heads + kv_head
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, BLOCK_T * BLOCK_G, HEAD_DIM], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_desc.layout)
    mass_smem = gl.allocate_shared_memory(
        gl.float32, [2 * WARPGROUPS, BLOCK_K // CELLS, CELLS * BLOCK_T],
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )  # fmt: skip
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    given = (
        scores_ptr, lse_ptr, q_ptr + wide_batch * octet_qb * 8, q_smem, k_smem, mass_smem, full,
        empty, octet_qt, octet_qh, scale, kv_head, row_base, stat_base, out_base * num_blocks,
        first, q_len, num_q, num_kv_heads, num_blocks, steps,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _compute_partition,
                (
                    given, GROUP, HEAD_DIM, CELLS, REACH, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 0,
                ),
            ),
            (
                _compute_partition,
                (
                    given, GROUP, HEAD_DIM, CELLS, REACH, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 1,
                ),
            ),
            (
                _compute_partition,
                (
                    given, GROUP, HEAD_DIM, CELLS, REACH, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 2,
                ),
            ),
            (
                _compute_partition,
                (
                    given, GROUP, HEAD_DIM, CELLS, REACH, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 3,
                ),
            ),
            (
                _load_partition,
                (
                    k_desc, k_smem, full, empty, batch * k_batch_rows + c_start,
                    kv_head * k_head_cols, steps, STAGES,
                ),
            ),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip

"""Block scores for Hopper (Gluon): one warp loads keys, four warpgroups compute.

Computes what ``nsa_block_scores_kernel`` computes, into the same scratch, if a selection block
holds a power of two of strides, 64 at most, and at least the two latest blocks are forced.  Each
warpgroup has its own tokens and waits for no other, so that products overlap exponentials.

After a product, a thread holds all heads of some tokens, but only two keys of each.  The sums over
heads are exchanged once; then a thread has all keys of neighbouring blocks of a token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import thread_barrier, tma_load
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.kernels.tiles import locate_rows
from sparsek_kernels.nsa.select.kernels.scores import with_spill

WARPGROUPS: gl.constexpr = gl.constexpr(4)


@gluon.jit
def _load_partition(k_desc, k_smem, full, empty, row, col, steps, STAGES: gl.constexpr):
    """Issue the copies of ``steps`` tiles of keys from ``row`` on."""
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
        tma_load(
            k_desc, [row + step * k_desc.block_type.shape[0], col], full.index(stage),
            k_smem.index(stage),
        )  # fmt: skip


@gluon.jit
def _block_scores(
    s, lse, scale_log2, carried,
    PER_SEL: gl.constexpr, PER_CMP: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_G: gl.constexpr,
    PART_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores ``[BLOCK_B, BLOCK_T]`` of products ``s [BLOCK_K, BLOCK_G * BLOCK_T]``.

    ``carried`` are the sums that the tile before adds to the first block; the second result is
    ``carried`` of the next tile.
    """
    BLOCK_K: gl.constexpr = s.shape[0]
    BLOCK_B: gl.constexpr = BLOCK_K // PER_SEL
    p = gl.exp2(s * scale_log2 - lse[None, :])
    mass = gl.sum(p.reshape([BLOCK_K, BLOCK_G, BLOCK_T]), 1)  # [BLOCK_K, BLOCK_T]
    mass = gl.convert_layout(mass.reshape([BLOCK_B, PER_SEL, BLOCK_T]), PART_LAYOUT)
    part = gl.arange(0, PER_SEL, gl.SliceLayout(0, gl.SliceLayout(2, PART_LAYOUT)))
    spill = gl.maximum(part + (PER_CMP - PER_SEL), 0).to(gl.float32)[None, :, None]
    scores = gl.sum(mass * (PER_CMP - spill), 1)  # [BLOCK_B, BLOCK_T]
    if PER_CMP > 1:
        # Most strides spill nothing: a choice of zeros costs less than products with them.
        spilled = gl.sum(gl.where(spill > 0.0, mass * spill, 0.0), 1)
        block = gl.arange(0, BLOCK_B, gl.SliceLayout(1, gl.SliceLayout(1, PART_LAYOUT)))[:, None]
        scores, carried = with_spill(scores, spilled, carried, block)
    return scores, carried


@gluon.jit
def _compute_partition(
    given,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PER_SEL: gl.constexpr, PER_CMP: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: ``BLOCK_K`` keys for all heads of ``BLOCK_T`` tokens at a time.

    Rows of q count the heads of a token ``BLOCK_T`` apart, so that a thread holds all of them.
    """
    (
        scores_ptr, lse_ptr, q_base, q_smem, k_smem, full, empty, octet_qt, octet_qh,
        scale, kv_head, row_base, stat_base, out_base, first, num_rows, num_q, num_kv_heads,
        pitch, steps,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = BLOCK_T * BLOCK_G
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    BLOCK_B: gl.constexpr = BLOCK_K // PER_SEL
    # A thread has all keys of up to four neighbouring blocks, whose scores are one store.
    HELD: gl.constexpr = max(min(BLOCK_B * BLOCK_T // 128, BLOCK_B, 4), 1)
    LANES: gl.constexpr = min(BLOCK_B // HELD, 32)
    PART_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [HELD, PER_SEL, 1], [LANES, 1, 32 // LANES], [1, 1, 4], [1, 0, 2]
    )
    OUT_LAYOUT: gl.constexpr = gl.SliceLayout(1, PART_LAYOUT)  # [BLOCK_B, BLOCK_T]
    q_buf = q_smem.index(INDEX)
    first += INDEX * BLOCK_T
    row_base += INDEX * BLOCK_T
    stat_base += INDEX * BLOCK_T
    out_base += INDEX * BLOCK_T * num_kv_heads.to(gl.int64) * pitch
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
    lse = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    scale_log2 = scale * LOG2E
    zero_s = gl.zeros([BLOCK_K, ROWS], gl.float32, S_LAYOUT)
    block = gl.arange(0, BLOCK_B, gl.SliceLayout(1, OUT_LAYOUT))
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, OUT_LAYOUT))
    mask_t = (first + token < num_rows)[None, :]
    # The rows of one warpgroup are near each other: 32 bits from their base save registers.
    out = token[None, :] * (num_kv_heads * pitch) + block[:, None]  # [BLOCK_B, BLOCK_T]
    carried = gl.zeros([BLOCK_B, BLOCK_T], gl.float32, OUT_LAYOUT)
    fence_async_shared()
    thread_barrier()
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        s = warpgroup_mma(k_smem.index(stage), q_buf.permute((1, 0)), zero_s, use_acc=False)
        mbarrier.arrive(empty.index(stage), count=1)
        scores, carried = _block_scores(
            s, lse, scale_log2, carried, PER_SEL, PER_CMP, BLOCK_T, BLOCK_G, PART_LAYOUT
        )
        gl.store(scores_ptr + out_base + out, scores, mask=mask_t)
        out += BLOCK_B


@gluon.jit
def nsa_block_scores_hopper_kernel(
    scores_ptr, q_ptr, k_desc, lse_ptr, cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr, tiles_ptr,
    scale,
    octet_qb, octet_qt, octet_qh,
    k_batch_rows, k_head_cols,
    first_row, num_rows, num_q, offset, num_heads, num_cmp, pitch,
    Q_LAYOUT: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CMP_BLOCK: gl.constexpr,
    CMP_STRIDE: gl.constexpr, SEL_BLOCK: gl.constexpr, NUM_LOCAL: gl.constexpr,
    VARLEN: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program: ``WARPGROUPS * BLOCK_T`` neighbouring tokens of one KV head, the last first.

    ``k_desc`` describes compressed keys as a matrix ``[C, heads * D]``.  Strides of q count groups
    of eight elements.
    """
    PER_SEL: gl.constexpr = SEL_BLOCK // CMP_STRIDE
    PER_CMP: gl.constexpr = CMP_BLOCK // CMP_STRIDE
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
    steps = gl.maximum(end * PER_SEL + BLOCK_K - 1, 0) // BLOCK_K
    wide_batch = batch.to(gl.int64)
    num_kv_heads = gl.num_programs(1)
    row_base = q_start + first
    stat_base = (wide_batch * num_heads + kv_head * GROUP) * num_q + row_base
    out_base = (wide_batch * num_rows + row_base - first_row) * num_kv_heads + kv_head
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, BLOCK_T * BLOCK_G, HEAD_DIM], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_desc.layout)
    full, empty = ring_barriers(STAGES, 1, WARPGROUPS)
    given = (
        scores_ptr, lse_ptr, q_ptr + wide_batch * octet_qb * 8, q_smem, k_smem, full,
        empty, octet_qt, octet_qh, scale, kv_head, row_base, stat_base, out_base * pitch,
        first, q_len, num_q, num_kv_heads, pitch, steps,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute_partition, (
                given, GROUP, HEAD_DIM, PER_SEL, PER_CMP, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 0,
            )),
            (_compute_partition, (
                given, GROUP, HEAD_DIM, PER_SEL, PER_CMP, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 1,
            )),
            (_compute_partition, (
                given, GROUP, HEAD_DIM, PER_SEL, PER_CMP, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 2,
            )),
            (_compute_partition, (
                given, GROUP, HEAD_DIM, PER_SEL, PER_CMP, BLOCK_T, BLOCK_G, BLOCK_K, STAGES, 3,
            )),
            (_load_partition, (
                k_desc, k_smem, full, empty, batch * k_batch_rows + c_start,
                kv_head * k_head_cols, steps, STAGES,
            )),
        ],
        [4, 4, 4, 1], [112, 112, 112, 24],
    )  # fmt: skip

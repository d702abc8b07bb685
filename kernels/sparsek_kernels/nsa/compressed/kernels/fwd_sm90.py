"""Attention over compressed blocks on Hopper, with the sums that selection needs (Gluon).

A persistent program takes tiles of ``2 x 64`` queries of one head; one warp loads, two warpgroups
compute, and products of a tile of keys overlap the softmax of the next (FlashAttention-3,
arXiv 2407.08608, sections 3.1 and 3.2).

Block scores (arXiv 2502.11089, equations 9 and 10) are sums of probabilities over the keys of a
selection block and the heads of a group.  The sums over keys are taken here, where the weights are
at hand, relative to a maximum of each head; the kernel that chooses adds up the heads once their
log-sum-exps are known.  So scores cost no products of their own.

No score exceeds the product of the lengths of its query and of the longest key (Cauchy and
Schwarz).  Where that is small, weights relative to it are far from zero, and nothing has to be
rescaled to a running maximum (``BOUNDED``).  Tiles that turn out not to be so bounded are left to
a second launch, which keeps running maxima.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.masks import last_key
from sparsek_kernels.common.kernels.softmax import LN2
from sparsek_kernels.common.kernels.softmax_sm90 import anchor, lane_sums
from sparsek_kernels.common.kernels.tiles_sm90 import tile_index
from sparsek_kernels.nsa.compressed.kernels.block_sums_sm90 import KEYS, arranged_key, block_sums
from sparsek_kernels.nsa.compressed.kernels.fwd_load_sm90 import (
    Q_STAGES,
    ROWS,
    load_partition,
    place,
)


@gluon.jit
def _weights(
    s, m, total, spilled, last_seen, j, sums, scale_log2,
    MASKED: gl.constexpr, BOUNDED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Softmax of the scores of one tile; its block sums and their maxima go to memory.

    Weights are relative to ``m``: the running maximum, or what no score exceeds (``BOUNDED``).
    Each of the four lanes that share a row has a ``total`` of its own.
    """
    S_LAYOUT: gl.constexpr = s.type.layout
    LANES: gl.constexpr = total.type.layout
    if MASKED:
        key = arranged_key(gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))) + j * KEYS
        s = gl.where(key[None, :] <= last_seen[:, None], s, float("-inf"))
    alpha = m
    alpha_lanes = 1.0
    if not BOUNDED:
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        m_ref = m_new
        if MASKED:
            m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m - m_ref)
        alpha_lanes = gl.convert_layout(alpha, gl.SliceLayout(1, LANES))[:, None]
        total *= alpha_lanes
        m = m_new
    else:
        m_ref = m
    p = gl.exp2(s * scale_log2 - m_ref[:, None])  # [ROWS, KEYS]
    if SUMS:
        words_ptr, words_held, maxima_ptr, maxima_held = sums
        WORDS: gl.constexpr = words_ptr.type.layout
        words, largest, spilled, lanes = block_sums(
            p, m, alpha_lanes, spilled, BOUNDED, WORDS, LANES
        )
        gl.store(words_ptr + j * 16, words, mask=words_held)
        gl.store(maxima_ptr + j, largest, mask=maxima_held)
    else:
        lanes = lane_sums(p, LANES)
    return p, m, total + lanes, alpha, spilled


@gluon.jit
def _compute_tiles(
    acc, p, m, total, spilled, count, first, last,
    q_buf, k_smem, v_smem, bars,
    lse_ptr,
    last_seen, sums, scale_log2,
    MASKED: gl.constexpr, BOUNDED: gl.constexpr, SUMS: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles ``first .. last`` of keys; ``p`` holds weights of the one before, not yet applied."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = bars
    for j in range(first, last):
        stage = count % STAGES
        before = (count - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        s_token = warpgroup_mma(
            q_buf, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        weights, m, total, alpha, spilled = _weights(
            s, m, total, spilled, last_seen, j, sums, scale_log2, MASKED, BOUNDED, SUMS
        )
        if not SUMS:  # stores of sums keep their place by themselves
            total = anchor(total, lse_ptr)
        mbarrier.arrive(k_empty.index(stage), count=1)
        acc, p, weights = warpgroup_mma_wait(0, deps=[acc_token, p, weights])
        mbarrier.arrive(v_empty.index(before), count=1)
        p = gl.convert_layout(weights.to(v_smem.dtype), P_LAYOUT)
        if not BOUNDED:
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        count += 1
    return acc, p, m, total, spilled, count


@gluon.jit
def _norms(q_buf, layout: gl.constexpr):
    """Lengths of rows in shared memory."""
    x = q_buf.load(layout).to(gl.float32)
    return gl.sqrt(gl.sum(x * x, 1))


@gluon.jit
def _compute_partition(
    where,
    out_ptr, lse_ptr, words_ptr, maxima_ptr,
    q_smem, k_smem, v_smem, bars,
    scale_log2, longest, num_q, pitch, num_tiles,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SUMS: gl.constexpr, BOUNDED: gl.constexpr,
    BOUND: gl.constexpr, VARLEN: gl.constexpr, STAGES: gl.constexpr, CMP_BLOCK: gl.constexpr,
    CMP_STRIDE: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows ``INDEX * 64 ..`` of each tile, from scores to output."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    left_ptr, first_row, num_rows, num_heads = where[4], where[6], where[7], where[8]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    # Where block sums lie: four lanes share two rows, each with eight neighbouring blocks.
    WORDS_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, 16],
    )
    Q_ROWS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]] + ([[0, 64]] if HEAD_DIM == 128 else []),
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, HEAD_DIM],
    )
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    WORD_ROWS: gl.constexpr = gl.SliceLayout(1, WORDS_LAYOUT)
    count = 0
    done = 0
    for step in range(gl.cdiv(num_tiles, gl.num_programs(0))):
        tile = tile_index(step)
        if tile < num_tiles:
            valid, batch, head, _, q_start, q_len, row, offset, _, full, steps = place(
                where, tile, GROUP, VARLEN, BOUNDED, CMP_BLOCK, CMP_STRIDE
            )
            if valid:
                row += INDEX * ROWS
                rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
                last_seen = last_key(rows + offset, CMP_BLOCK, CMP_STRIDE)
                # Rows and tiles are counted in 32 bits, elements of memory in 64.
                base = (batch * num_rows + q_start - first_row) * num_heads + head
                word_row = row + gl.arange(0, ROWS, WORD_ROWS)
                words_at = (base + word_row * num_heads) * pitch
                maxima_at = (base + rows * num_heads) * pitch
                word = gl.arange(0, 16, gl.SliceLayout(0, WORDS_LAYOUT))
                sums = (
                    words_ptr + (words_at.to(gl.int64)[:, None] * 16 + word[None, :]),
                    gl.expand_dims(word_row < q_len, 1), maxima_ptr + maxima_at, rows < q_len,
                )  # fmt: skip
                total = gl.zeros([ROWS, 4], gl.float32, LANES)
                spilled = total
                slot = done % Q_STAGES * 2 + INDEX
                q_buf = q_smem.index(slot)
                stage = count % STAGES
                mbarrier.wait(q_full.index(slot), (done // Q_STAGES) & 1)
                mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
                s = warpgroup_mma(
                    q_buf, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
                if BOUNDED:
                    m = gl.convert_layout(_norms(q_buf, Q_ROWS), ROW_LAYOUT) * longest
                    if (gl.max(gl.where(rows < q_len, m, 0.0), 0) <= BOUND) == 0:
                        gl.store(left_ptr + tile, 1)
                        gl.store(left_ptr + num_tiles, 1)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_empty.index(stage), count=1)
                acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
                weights, m, total, _alpha, spilled = _weights(
                    s, m, total, spilled, last_seen, 0, sums, scale_log2, True, BOUNDED, SUMS
                )
                p = gl.convert_layout(weights.to(v_smem.dtype), P_LAYOUT)
                count += 1
                acc, p, m, total, spilled, count = _compute_tiles(
                    acc, p, m, total, spilled, count, 1, full, q_buf, k_smem, v_smem, bars, lse_ptr,
                    last_seen, sums, scale_log2, False, BOUNDED, SUMS, STAGES, S_LAYOUT, O_LAYOUT,
                    P_LAYOUT,
                )  # fmt: skip
                acc, p, m, total, spilled, count = _compute_tiles(
                    acc, p, m, total, spilled, count, gl.maximum(full, 1), steps, q_buf, k_smem,
                    v_smem, bars, lse_ptr, last_seen, sums, scale_log2, True, BOUNDED, SUMS,
                    STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
                mbarrier.arrive(q_empty.index(slot), count=1)
                before = (count - 1) % STAGES
                mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
                acc_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
                total = gl.convert_layout(gl.sum(total, 1), ROW_LAYOUT)
                empty = total == 0.0
                lse = gl.where(empty, float("-inf"), (m + gl.log2(total)) * LN2)
                inv_l = 1.0 / gl.where(empty, 1.0, total)
                lse_base = lse_ptr + ((batch * num_heads + head) * num_q + q_start)
                gl.store(lse_base + rows, lse, mask=rows < q_len)
                acc = warpgroup_mma_wait(0, deps=[acc_token])
                mbarrier.arrive(v_empty.index(before), count=1)
                acc = acc * gl.convert_layout(inv_l, gl.SliceLayout(1, O_LAYOUT))[:, None]
                stored = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORE_LAYOUT)
                out_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, STORE_LAYOUT))
                col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORE_LAYOUT))
                out_at = (batch * num_q + q_start + out_row) * num_heads + head
                out_at = out_at.to(gl.int64) * HEAD_DIM
                gl.store(
                    out_ptr + out_at[:, None] + col[None, :],
                    stored,
                    mask=(out_row < q_len)[:, None],
                )
                done += 1


@gluon.jit
def nsa_compressed_hopper_fwd_kernel(
    out_ptr, lse_ptr, words_ptr, maxima_ptr, longest_ptr, left_ptr, q_desc, k_desc, v_desc,
    cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr, tiles_ptr,
    scale_log2,
    q_batch_rows, q_head_cols, k_batch_rows,
    first_row, num_rows, num_q, num_heads, pitch, num_blocks, num_tiles,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CMP_BLOCK: gl.constexpr, CMP_STRIDE: gl.constexpr,
    SUMS: gl.constexpr, BOUNDED: gl.constexpr, BOUND: gl.constexpr, VARLEN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: one program per multiprocessor, each taking ``num_tiles / programs`` tiles.

    ``k_desc`` and ``v_desc`` describe arranged keys and values.  With ``SUMS``, block sums go to
    ``words [B, num_rows, Hq, pitch, 16]`` int32 (two in each, :func:`block_sums`) and the maxima
    that they are relative to, in base 2, to ``maxima [B, num_rows, Hq, pitch]`` fp32, both for the
    tiles of ``KEYS`` keys that a query's tile of rows sees.

    A launch with ``BOUNDED`` serves tiles whose scores do not exceed ``BOUND``, base 2, or none at
    all if sampled queries exceed it (``longest``, :func:`nsa_arrange_kernel`).  It marks the tiles
    that it leaves in ``left [num_tiles + 1]`` int32, zeros before; the last entry tells whether
    any are left.  A launch without ``BOUNDED`` serves them.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * Q_STAGES, ROWS, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], v_desc.layout)
    q_full, q_empty = ring_barriers(2 * Q_STAGES, 1, 1)
    k_full, k_empty = ring_barriers(STAGES, 1, 2)
    v_full, v_empty = ring_barriers(STAGES, 1, 2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    # In units of scores, base 2; a little more, because lengths are rounded.
    longest = gl.load(longest_ptr) * gl.abs(scale_log2) * 1.01
    all_left = (longest * gl.load(longest_ptr + 1) <= BOUND) == 0
    served = all_left == 0
    if not BOUNDED:
        served = (gl.load(left_ptr + num_tiles) != 0) | all_left
    num_tiles = gl.where(served, num_tiles, 0)
    where = (
        tiles_ptr, cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr, left_ptr, all_left, first_row, num_rows,
        num_heads, num_blocks,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute_partition, (
                where, out_ptr, lse_ptr, words_ptr, maxima_ptr, q_smem, k_smem, v_smem, bars,
                scale_log2, longest, num_q, pitch, num_tiles, GROUP, HEAD_DIM, SUMS, BOUNDED,
                BOUND, VARLEN, STAGES, CMP_BLOCK, CMP_STRIDE, 0,
            )),
            (_compute_partition, (
                where, out_ptr, lse_ptr, words_ptr, maxima_ptr, q_smem, k_smem, v_smem, bars,
                scale_log2, longest, num_q, pitch, num_tiles, GROUP, HEAD_DIM, SUMS, BOUNDED,
                BOUND, VARLEN, STAGES, CMP_BLOCK, CMP_STRIDE, 1,
            )),
            (load_partition, (
                where, q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, q_batch_rows,
                q_head_cols, k_batch_rows, num_tiles, GROUP, VARLEN, BOUNDED, STAGES, CMP_BLOCK,
                CMP_STRIDE,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

"""Block scores of selection, from the mass that compressed attention puts on each block.

With ``p = exp(scale q . k_c - lse)``, ``R = l / d`` and ``K = l' / d`` (arXiv 2502.11089,
equations 9 and 10), a compressed block that starts at stride ``m`` of selection block ``j`` shares
``R - spill(m)`` strides with ``j`` and ``spill(m) = max(m + R - K, 0)`` with ``j + 1``:

    mass_c = sum of p over the heads of the group
    score_j = sum_m (R - spill(m)) mass_{jK + m} + sum_m spill(m) mass_{(j - 1) K + m}

Scores of some thousand tokens at a time pass through a scratch tensor of ``[tokens, Hkv, pitch]``,
``K`` times the heads of a group smaller than the probabilities; then ``topk.py`` picks each token's
best.  ``pitch`` is the number of blocks rounded up to a multiple of 64: scores move 16 bytes at a
time, and tiles of blocks need no mask.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.kernels.tiles import compressed_visible, locate_rows


@triton.jit
def with_spill(own, spilled, carried, block):
    """Scores ``[BLOCK_B, BLOCK_T]``: each block's ``own`` sum plus the spill of the one before.

    ``block [BLOCK_B, 1]`` counts from 0.  The first block takes the spill ``carried`` from the tile
    before; row 0 of the second result is carried to the next tile.
    """
    BLOCK_B: tl.constexpr = own.shape[0]
    before = tl.broadcast_to((block + (BLOCK_B - 1)) % BLOCK_B, own.shape)
    rotated = tl.gather(spilled, before, 0)
    return own + tl.where(block == 0, carried, rotated), rotated


@triton.jit
def _sum_times(mass, times, MOST: tl.constexpr):
    """Sums over the second axis of ``mass [.., C, ..]``, each taken ``times [C]``, up to ``MOST``.

    Products with powers of two are exact.  Lanes that add two other products, each with its own
    fused into the sum, would differ in it, and then write different sums to one place.
    """
    taken = tl.zeros_like(mass)
    for bit in tl.static_range(16):
        if MOST >> bit:
            taken += mass * (times & (1 << bit)).to(tl.float32)[None, :, None]
    return tl.sum(taken, 1)


@triton.jit
def _block_scores(
    q,
    k_ptr,
    lse, seen, first_block, c_len, scale_log2,
    stride_kt, stride_kd,
    HEAD_DIM: tl.constexpr, PER_SEL: tl.constexpr, PER_CMP: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``(own, spilled)`` sums of the blocks from ``first_block`` on, ``[BLOCK_B, BLOCK_T]`` each.

    ``BLOCK_C`` rows of keys stand for each block, ``PER_SEL`` of them in use.  Rows of q count the
    heads of a token ``BLOCK_T`` apart, so that a thread holds all of them.
    """
    offs_k = tl.arange(0, BLOCK_B * BLOCK_C)  # [BLOCK_B * BLOCK_C]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    part = offs_k % BLOCK_C
    key = (first_block + offs_k // BLOCK_C) * PER_SEL + part
    mask_k = (part < PER_SEL) & (key < c_len)
    k = tl.load(
        k_ptr + key.to(tl.int64)[:, None] * stride_kt + offs_d[None, :] * stride_kd,
        mask=mask_k[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_B * BLOCK_C, BLOCK_D]
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [keys, BLOCK_G * BLOCK_T]
    p = tl.exp2(scores * scale_log2 - lse[None, :])
    if MASKED:
        p = tl.where(key[:, None] < seen[None, :], p, 0.0)
    mass = tl.sum(tl.reshape(p, [BLOCK_B * BLOCK_C, BLOCK_G, BLOCK_T]), 1)
    mass = tl.reshape(mass, [BLOCK_B, BLOCK_C, BLOCK_T])
    offs_c = tl.arange(0, BLOCK_C)
    spill = tl.where(offs_c < PER_SEL, tl.maximum(offs_c + (PER_CMP - PER_SEL), 0), 0)  # [BLOCK_C]
    share = tl.where(offs_c < PER_SEL, PER_CMP, 0) - spill
    return _sum_times(mass, share, PER_CMP), _sum_times(mass, spill, PER_CMP - 1)


@triton.jit
def nsa_block_scores_kernel(
    scores_ptr, q_ptr, k_ptr, lse_ptr, cu_rows_ptr, cu_seqlens_ptr, cu_cmp_ptr, tiles_ptr,
    scale,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    first_row, num_rows, num_q, offset, num_heads, num_cmp, pitch,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    SEL_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr, VARLEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_T`` neighbouring tokens of one KV head, all heads of the group.

    Writes fp32 scores ``[B, num_rows, Hkv, pitch]`` of blocks before the ``NUM_LOCAL`` latest; the
    rest of the scratch holds anything.  The last tokens start first.
    """
    PER_SEL: tl.constexpr = SEL_BLOCK // CMP_STRIDE
    PER_CMP: tl.constexpr = CMP_BLOCK // CMP_STRIDE
    kv_head = tl.program_id(1)
    seq, tile, batch, q_start, q_len, c_start, c_len, offset = locate_rows(
        tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2), tiles_ptr, cu_rows_ptr,
        cu_seqlens_ptr, cu_cmp_ptr, first_row, num_rows, offset, num_cmp, VARLEN,
    )  # fmt: skip
    if seq < 0:
        return
    batch = batch.to(tl.int64)
    offs_r = tl.arange(0, BLOCK_T * BLOCK_G)  # [BLOCK_T * BLOCK_G]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    local = tile * BLOCK_T + offs_r % BLOCK_T
    member = offs_r // BLOCK_T
    mask_r = (local < q_len) & (member < GROUP)
    head = kv_head * GROUP + member
    rows = (q_start + local).to(tl.int64)
    q_row = batch * stride_qb + rows * stride_qt + head.to(tl.int64) * stride_qh
    q = tl.load(
        q_ptr + q_row[:, None] + offs_d[None, :] * stride_qd,
        mask=mask_r[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_T * BLOCK_G, BLOCK_D]
    stat = (batch * num_heads + head) * num_q + rows
    lse = tl.load(lse_ptr + stat, mask=mask_r, other=float("inf"))  # [BLOCK_T * BLOCK_G]
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    seen = compressed_visible(local + offset, CMP_BLOCK, CMP_STRIDE)  # [BLOCK_T * BLOCK_G]
    last = tl.minimum(tile * BLOCK_T + BLOCK_T, q_len) - 1 + offset
    end = last // SEL_BLOCK - NUM_LOCAL + 1
    k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    k_base += c_start.to(tl.int64) * stride_kt
    offs_t = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    out_row = (batch * num_rows + q_start - first_row + offs_t) * tl.num_programs(1) + kv_head
    mask_t = (offs_t < q_len)[None, :]
    block = tl.arange(0, BLOCK_B)[:, None]  # [BLOCK_B, 1]
    carried = tl.zeros([BLOCK_B, BLOCK_T], tl.float32)
    for first in tl.range(0, end, BLOCK_B, num_stages=NUM_STAGES):
        scores, spilled = _block_scores(
            q, k_base, lse, seen, first, c_len, scale * LOG2E,
            stride_kt, stride_kd, HEAD_DIM, PER_SEL, PER_CMP, NUM_LOCAL < 2,
            BLOCK_T, BLOCK_G, BLOCK_B, BLOCK_C, BLOCK_D, PRECISION,
        )  # fmt: skip
        if PER_CMP > 1:
            scores, carried = with_spill(scores, spilled, carried, block)
        tl.store(scores_ptr + out_row[None, :] * pitch + first + block, scores, mask=mask_t)

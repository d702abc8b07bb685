"""Choosing blocks: compressed-attention mass, block scores and a running top-n, all on chip.

With ``p = exp(scale q . k_c - lse)``, ``R = l / d`` and ``K = l' / d`` (arXiv 2502.11089,
equations 9 and 10), a compressed block that starts at stride ``m`` of selection block ``j`` shares
``R - spill(m)`` strides with ``j`` and ``spill(m) = max(m + R - K, 0)`` with ``j + 1``:

    mass_c = sum of p over the heads of the group
    score_j = sum_m (R - spill(m)) mass_{jK + m} + sum_m spill(m) mass_{(j - 1) K + m}

Scores are not negative, so their bits order as integers; with the complement of the block index
below them, one 64-bit comparison ranks by score and then by lower index.
"""

import triton
import triton.language as tl

from sparsek_kernels.nsa.kernels_tiles import compressed_visible, locate_tile


@triton.jit
def _block_scores(
    q,
    k_ptr,
    lse,
    seen,
    carry,
    first_block,
    c_len,
    scale_log2,
    stride_kt,
    stride_kd,
    HEAD_DIM: tl.constexpr,
    CELLS: tl.constexpr,
    REACH: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores ``[BLOCK_B, BLOCK_T]`` of selection blocks from ``first_block`` on.

    ``BLOCK_C`` rows of keys stand for each block, ``CELLS`` of them in use.  ``carry`` is what
    the block before ``first_block`` spills; the second result is what the last one here does.
    """
    offs_k = tl.arange(0, BLOCK_B * BLOCK_C)  # [BLOCK_B * BLOCK_C]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    cell = offs_k % BLOCK_C
    key = (first_block + offs_k // BLOCK_C) * CELLS + cell
    mask_k = (cell < CELLS) & (key < c_len)
    k = tl.load(
        k_ptr + key.to(tl.int64)[:, None] * stride_kt + offs_d[None, :] * stride_kd,
        mask=mask_k[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_B * BLOCK_C, BLOCK_D]
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [keys, BLOCK_T * BLOCK_G]
    p = tl.exp2(scores * scale_log2 - lse[None, :])
    counts = mask_k[:, None]
    if MASKED:
        counts = counts & (key[:, None] < seen[None, :])
    p = tl.where(counts, p, 0.0)
    mass = tl.sum(tl.reshape(p, [BLOCK_B * BLOCK_C, BLOCK_T, BLOCK_G]), 2)
    mass = tl.reshape(mass, [BLOCK_B, BLOCK_C, BLOCK_T])
    spill = tl.maximum(tl.arange(0, BLOCK_C) + (REACH - CELLS), 0).to(tl.float32)  # [BLOCK_C]
    spilled = tl.sum(mass * spill[None, :, None], 1)  # [BLOCK_B, BLOCK_T]
    own = tl.sum(mass * (REACH - spill)[None, :, None], 1)  # [BLOCK_B, BLOCK_T]
    if REACH > 1:
        offs_b = tl.arange(0, BLOCK_B)[:, None]
        before = tl.broadcast_to(tl.maximum(offs_b - 1, 0), [BLOCK_B, BLOCK_T])
        shifted = tl.gather(spilled, before, 0)  # [BLOCK_B, BLOCK_T]
        own += tl.where(offs_b == 0, carry[None, :], shifted)
        carry = tl.sum(tl.where(offs_b == BLOCK_B - 1, spilled, 0.0), 0)  # [BLOCK_T]
    return own, carry


@triton.jit
def nsa_select_kernel(
    indices_ptr,
    q_ptr,
    k_ptr,
    lse_ptr,
    cu_seqlens_ptr,
    cu_cmp_ptr,
    tiles_ptr,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    num_q,
    offset,
    num_heads,
    num_cmp,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CMP_BLOCK: tl.constexpr,
    CMP_STRIDE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    TOP_N: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: ``BLOCK_T`` neighbouring tokens of one KV head, all heads of the group.

    Candidates are the blocks from ``NUM_INIT`` on that lie before the ``NUM_LOCAL`` latest;
    ``TOP_N - NUM_INIT - NUM_LOCAL`` of them are kept in ``BLOCK_S`` running slots.  Writes
    contiguous ``[B, N, Hkv, TOP_N]`` int32, ascending, -1 after the last.
    """
    FREE: tl.constexpr = TOP_N - NUM_INIT - NUM_LOCAL
    CELLS: tl.constexpr = SEL_BLOCK // CMP_STRIDE
    kv_head = tl.program_id(1)
    seq, tile, batch, q_start, q_len, c_start, offset = locate_tile(
        tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2),
        tiles_ptr, cu_seqlens_ptr, cu_cmp_ptr, num_q, offset, VARLEN,
    )  # fmt: skip
    if seq < 0:
        return
    c_len = num_cmp
    if VARLEN:
        c_len = tl.load(cu_cmp_ptr + seq + 1) - c_start
    batch = batch.to(tl.int64)
    offs_r = tl.arange(0, BLOCK_T * BLOCK_G)  # [BLOCK_T * BLOCK_G]
    offs_t = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    local = tile * BLOCK_T + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
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
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * 1.4426950408889634
    seen = compressed_visible(local + offset, CMP_BLOCK, CMP_STRIDE)  # [BLOCK_T * BLOCK_G]
    own = (offs_t + offset) // SEL_BLOCK  # [BLOCK_T]
    last = tl.minimum(tile * BLOCK_T + BLOCK_T, q_len) - 1 + offset
    end = last // SEL_BLOCK - NUM_LOCAL + 1
    best = tl.full([BLOCK_T, BLOCK_S], -1, dtype=tl.int64)  # [BLOCK_T, BLOCK_S]
    if FREE > 0:
        k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
        k_base += c_start.to(tl.int64) * stride_kt
        carry = tl.zeros([BLOCK_T], dtype=tl.float32)  # [BLOCK_T]
        for first in tl.range(0, end, BLOCK_B):
            score, carry = _block_scores(
                q, k_base, lse, seen, carry, first, c_len, scale * 1.4426950408889634,
                stride_kt, stride_kd, HEAD_DIM, CELLS, CMP_BLOCK // CMP_STRIDE, NUM_LOCAL < 2,
                BLOCK_T, BLOCK_G, BLOCK_B, BLOCK_C, BLOCK_D, PRECISION,
            )  # fmt: skip
            block = first + tl.arange(0, BLOCK_B)[:, None]  # [BLOCK_B, 1]
            ok = (block >= NUM_INIT) & (block <= own[None, :] - NUM_LOCAL)
            # NaN counts as zero: whatever q holds, valid blocks come out.
            bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
            rank = tl.where(ok, (bits << 32) | (0x7FFFFFFF - block), -1)  # [BLOCK_B, BLOCK_T]
            rank = tl.trans(rank)
            fresh = tl.max(rank, 1) > tl.min(best, 1)  # [BLOCK_T]
            if tl.max(fresh.to(tl.int32), 0) > 0:
                found = tl.flip(tl.topk(rank, BLOCK_S), 1)  # [BLOCK_T, BLOCK_S], ascending
                best = tl.sort(tl.maximum(best, found), descending=True)
    slot = tl.arange(0, BLOCK_S)[None, :]  # [1, BLOCK_S]
    taken = (best >= 0) & (slot < FREE)
    block = tl.where(taken, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), 0x7FFFFFFF)
    block = tl.sort(block)  # [BLOCK_T, BLOCK_S]
    num_taken = tl.sum(taken.to(tl.int32), 1)  # [BLOCK_T]

    mask_t = offs_t < q_len
    out_row = ((batch * num_q + q_start + offs_t) * tl.num_programs(1) + kv_head) * TOP_N
    out = indices_ptr + out_row[:, None]
    num_init = tl.minimum(own + 1, NUM_INIT)  # [BLOCK_T]
    first_local = tl.maximum(own - NUM_LOCAL + 1, num_init)
    num_local = own + 1 - first_local
    offs_o = tl.arange(0, BLOCK_O)[None, :]  # [1, BLOCK_O]
    scored_end = (num_init + num_taken)[:, None]
    # Everything but the scored blocks follows from the position alone.
    rest = tl.where(
        offs_o < num_init[:, None],
        offs_o,
        tl.where(
            offs_o < scored_end + num_local[:, None],
            first_local[:, None] + offs_o - scored_end,
            -1,
        ),
    )
    by_rule = (offs_o < num_init[:, None]) | (offs_o >= scored_end)
    tl.store(out + offs_o, rest, mask=mask_t[:, None] & by_rule & (offs_o < TOP_N))
    if FREE > 0:
        scored = (slot < num_taken[:, None]) & mask_t[:, None]
        tl.store(out + num_init[:, None] + slot, block, mask=scored)

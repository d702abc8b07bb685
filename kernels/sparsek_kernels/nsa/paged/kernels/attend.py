"""The NSA decode step over a paged cache: compression, compressed attention, block scores.

One row of queries is a decoded token with all heads of a group; nothing is read back to the host.
Compressed block ``c`` (tokens ``c d .. c d + l - 1``) is stored in the stride in which it ends, row
``c + l / d - 1`` of the sequence.  The block scores are those of ``kernels_select.py``.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import softmax_finish, softmax_init, softmax_step
from sparsek_kernels.common.kernels.split_kv import add_splits
from sparsek_kernels.nsa.kernels.tiles import compressed_visible
from sparsek_kernels.paged.kernels.tiles import tile_span


@triton.jit
def _raw_row(
    raw_ptr,
    table_ptr,
    token,
    frequencies,
    stride_rp,
    stride_rh,
    stride_rt,
    offs_h,
    offs_d,
    mask_h,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """A token's rows ``(x, partner) [BLOCK_H, BLOCK_D]``; ``partner`` is half a head away.

    ``ROTATED`` rows are rotated back by the token's position.
    """
    partner_d = (offs_d + HEAD_DIM // 2) % HEAD_DIM
    page = tl.load(table_ptr + token // PAGE_SIZE).to(tl.int64)
    row = raw_ptr + page * stride_rp + (token % PAGE_SIZE) * stride_rt
    rows = row + offs_h.to(tl.int64)[:, None] * stride_rh
    mask = mask_h[:, None] & (offs_d < HEAD_DIM)[None, :]
    x = tl.load(rows + offs_d[None, :], mask=mask, other=0.0)
    partner = tl.load(rows + partner_d[None, :], mask=mask, other=0.0)
    if ROTATED:
        angle = token.to(tl.float32) * frequencies  # [BLOCK_D]
        cos = tl.cos(angle)[None, :]
        sin = tl.sin(angle)[None, :]
        sign = tl.where(offs_d < HEAD_DIM // 2, 1.0, -1.0)[None, :]
        back = x.to(tl.float32) * cos + sign * partner.to(tl.float32) * sin
        other = partner.to(tl.float32) * cos - sign * x.to(tl.float32) * sin
        return back.to(x.dtype), other.to(x.dtype)
    else:
        return x, partner


@triton.jit
def nsa_paged_compress_kernel(
    cmp_ptr,
    hidden_ptr,
    ticket_ptr,
    raw_ptr,
    w1_ptr,
    constant_ptr,
    w2_ptr,
    b2_ptr,
    frequencies_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    stride_cp,
    stride_ch,
    stride_cc,
    stride_rp,
    stride_rh,
    stride_rt,
    stride_br,
    TILES_PER_REQUEST: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    CMP_BLOCK: tl.constexpr,
    CMP_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_PHI: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    ROTATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: a share of the block that one decoded token completes, if it does, all KV heads.

    ``y = gelu(sum_t x_t W1[t] + constant) W2 + b2`` (arXiv 2502.11089, equation 7), or the mean,
    rotated by the position of the block's first token with ``HAS_ROPE``.  ``constant [HIDDEN]`` is
    ``vec(position) W1 + b1``.  The share is ``CMP_BLOCK / PARTS`` tokens times ``BLOCK_F`` columns
    of W1; the program that draws a token's last ticket adds the shares up, in order.
    """
    pid = tl.program_id(0)
    request, _base, pos, high, _zero = tile_span(
        pid, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    start = pos + 1 - CMP_BLOCK
    if (high < pos) | (start < 0) | (start % CMP_STRIDE != 0):
        return
    table = block_table_ptr + request.to(tl.int64) * stride_br
    offs_h = tl.arange(0, BLOCK_H)  # [BLOCK_H]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_h = offs_h < NUM_HEADS
    mask_d = offs_d < HEAD_DIM
    partner_d = (offs_d + HEAD_DIM // 2) % HEAD_DIM
    frequencies = tl.zeros([BLOCK_D], dtype=tl.float32)
    if HAS_ROPE:
        frequencies = tl.load(frequencies_ptr + offs_d % (HEAD_DIM // 2), mask=mask_d, other=0.0)
    y = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    z = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    if HAS_PHI:
        TOKENS: tl.constexpr = CMP_BLOCK // PARTS
        COLUMNS: tl.constexpr = (HIDDEN + BLOCK_F - 1) // BLOCK_F
        part = tl.program_id(1)
        offs_f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
        mask_f = offs_f < HIDDEN
        hidden = tl.zeros([BLOCK_H, BLOCK_F], dtype=tl.float32)
        for t in tl.range(part * TOKENS, part * TOKENS + TOKENS, num_stages=NUM_STAGES):
            x, _partner = _raw_row(
                raw_ptr, table, start + t, frequencies, stride_rp, stride_rh, stride_rt,
                offs_h, offs_d, mask_h, HEAD_DIM, PAGE_SIZE, ROTATED,
            )  # fmt: skip
            w1 = tl.load(
                w1_ptr + (t * HEAD_DIM + offs_d)[:, None] * HIDDEN + offs_f[None, :],
                mask=mask_d[:, None] & mask_f[None, :],
                other=0.0,
            )  # [BLOCK_D, BLOCK_F]
            hidden = tl.dot(x, w1, hidden, input_precision=PRECISION)
        shares = hidden_ptr + pid.to(tl.int64) * PARTS * BLOCK_H * HIDDEN
        shares += offs_h[:, None] * HIDDEN
        own = shares + part * BLOCK_H * HIDDEN + offs_f[None, :]
        tl.store(own, hidden, mask=mask_h[:, None] & mask_f[None, :])
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + pid, 1, sem="acq_rel")
        if ticket != PARTS * COLUMNS - 1:
            return
        tl.store(ticket_ptr + pid, 0)
        for first in tl.range(0, HIDDEN, BLOCK_F, num_stages=1):
            offs_f = first + tl.arange(0, BLOCK_F)
            mask_f = offs_f < HIDDEN
            hidden = tl.zeros([BLOCK_H, BLOCK_F], dtype=tl.float32)
            for p in tl.static_range(PARTS):
                hidden += tl.load(
                    shares + p * BLOCK_H * HIDDEN + offs_f[None, :],
                    mask=mask_h[:, None] & mask_f[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
            hidden += tl.load(constant_ptr + offs_f, mask=mask_f, other=0.0)[None, :]
            hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
            w2_rows = w2_ptr + offs_f[:, None] * HEAD_DIM
            mask_w = mask_f[:, None] & mask_d[None, :]
            w2 = tl.load(w2_rows + offs_d[None, :], mask=mask_w, other=0.0)  # [BLOCK_F, BLOCK_D]
            y = tl.dot(hidden.to(w2.dtype), w2, y, input_precision=PRECISION)
            if HAS_ROPE:
                w2 = tl.load(w2_rows + partner_d[None, :], mask=mask_w, other=0.0)
                z = tl.dot(hidden.to(w2.dtype), w2, z, input_precision=PRECISION)
        y += tl.load(b2_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        z += tl.load(b2_ptr + partner_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    else:
        for t in range(CMP_BLOCK):
            x, partner = _raw_row(
                raw_ptr, table, start + t, frequencies, stride_rp, stride_rh, stride_rt,
                offs_h, offs_d, mask_h, HEAD_DIM, PAGE_SIZE, ROTATED,
            )  # fmt: skip
            y += x.to(tl.float32)
            z += partner.to(tl.float32)
        y = y / CMP_BLOCK
        z = z / CMP_BLOCK
    if HAS_ROPE:
        angle = start.to(tl.float32) * frequencies
        sign = tl.where(offs_d < HEAD_DIM // 2, -1.0, 1.0)
        y = y * tl.cos(angle)[None, :] + z * (sign * tl.sin(angle))[None, :]
    page = tl.load(table + pos // PAGE_SIZE).to(tl.int64)
    row = cmp_ptr + page * stride_cp + (pos % PAGE_SIZE) // CMP_STRIDE * stride_cc
    tl.store(
        row + offs_h.to(tl.int64)[:, None] * stride_ch + offs_d[None, :],
        y.to(cmp_ptr.dtype.element_ty),
        mask=mask_h[:, None] & mask_d[None, :],
    )


@triton.jit
def _compressed_rows(
    cmp_ptr,
    table_ptr,
    block,
    mask,
    offs_d,
    stride_cp,
    stride_cc,
    HEAD_DIM: tl.constexpr,
    REACH: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
):
    """Compressed rows ``[BLOCK_N, BLOCK_D]`` of blocks ``block`` of one head."""
    row = block + REACH - 1
    page = tl.load(table_ptr + row // ROWS_PER_PAGE, mask=mask, other=0).to(tl.int64)
    at = page * stride_cp + (row % ROWS_PER_PAGE) * stride_cc  # [BLOCK_N]
    inside = mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(cmp_ptr + at[:, None] + offs_d[None, :], mask=inside, other=0.0)


@triton.jit
def nsa_paged_compressed_kernel(
    out_ptr,
    lse_ptr,
    first_ptr,
    part_ptr,
    state_ptr,
    ticket_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    scale,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_kc,
    stride_vp,
    stride_vh,
    stride_vc,
    stride_br,
    TILES_PER_REQUEST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CMP_BLOCK: tl.constexpr,
    CMP_STRIDE: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: one decoded token and KV head, one share of the compressed blocks it sees.

    The program that draws a token's last ticket adds the shares up, in order, and writes ``out``
    and the natural ``lse [T, Hq]``.  ``first [T]`` gets the row of q at which the token's sequence
    would start, were all of it there.
    """
    REACH: tl.constexpr = CMP_BLOCK // CMP_STRIDE
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request, _base, pos, high, token_of_zero = tile_span(
        tile, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    if high < pos:
        return
    token = (token_of_zero + pos).to(tl.int64)
    if (kv_head == 0) & (split == 0):
        tl.store(first_ptr + token, token_of_zero)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < GROUP
    mask_out = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    head = (kv_head * GROUP + offs_m).to(tl.int64)
    q_rows = token * stride_qt + head * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_out, other=0.0)

    seen = compressed_visible(pos, CMP_BLOCK, CMP_STRIDE)
    num_tiles = tl.cdiv(seen, BLOCK_N)
    per_split = tl.cdiv(num_tiles, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    table = block_table_ptr + request.to(tl.int64) * stride_br
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    scale_log2 = scale * 1.4426950408889634
    m, total = softmax_init(0.0, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for part in tl.range(begin, end, num_stages=NUM_STAGES):
        block = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        inside = block < seen
        k = _compressed_rows(
            k_head, table, block, inside, offs_d, stride_kp, stride_kc,
            HEAD_DIM, REACH, ROWS_PER_PAGE,
        )  # fmt: skip
        v = _compressed_rows(
            v_head, table, block, inside, offs_d, stride_vp, stride_vc,
            HEAD_DIM, REACH, ROWS_PER_PAGE,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        m, total, p, alpha = softmax_step(m, total, scores, scale_log2, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    if SPLITS > 1:
        place = (tile * NUM_KV_HEADS + kv_head).to(tl.int64)
        parts = part_ptr + place * SPLITS * BLOCK_M * BLOCK_D
        parts += offs_m[:, None] * BLOCK_D + offs_d[None, :]
        states = state_ptr + place * SPLITS * 2 * BLOCK_M + offs_m
        tl.store(states + (2 * split) * BLOCK_M, m, mask=mask_m)
        tl.store(states + (2 * split + 1) * BLOCK_M, total, mask=mask_m)
        if begin < end:
            tl.store(parts + split * BLOCK_M * BLOCK_D, acc, mask=mask_out)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel")
        if ticket != SPLITS - 1:
            return
        tl.store(ticket_ptr + place, 0)
        m, total, acc = add_splits(
            parts, states, mask_m, mask_out, tl.cdiv(num_tiles, tl.maximum(per_split, 1)),
            BLOCK_M, BLOCK_D, SPLITS,
        )  # fmt: skip
    inv_l, lse = softmax_finish(m, total)
    out_rows = token * stride_ot + head * stride_oh
    tl.store(
        out_ptr + out_rows[:, None] + offs_d[None, :],
        (acc * inv_l[:, None]).to(out_ptr.dtype.element_ty),
        mask=mask_out,
    )
    tl.store(lse_ptr + token * NUM_KV_HEADS * GROUP + head, lse, mask=mask_m)


@triton.jit
def nsa_paged_scores_kernel(
    scores_ptr,
    q_ptr,
    k_ptr,
    lse_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    scale,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_kc,
    stride_br,
    pitch,
    TILES_PER_REQUEST: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CMP_BLOCK: tl.constexpr,
    CMP_STRIDE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: ``BLOCKS`` selection blocks for one decoded token and KV head.

    Writes fp32 ``scores [T, Hkv, pitch]`` for blocks before the ``NUM_LOCAL`` latest: the
    compressed-attention mass of the ``BLOCK_C`` compressed blocks that touch them, each counted as
    often as the strides that they share.
    """
    CELLS: tl.constexpr = SEL_BLOCK // CMP_STRIDE
    REACH: tl.constexpr = CMP_BLOCK // CMP_STRIDE
    kv_head = tl.program_id(1)
    request, _base, pos, high, token_of_zero = tile_span(
        tl.program_id(0), seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    first = tl.program_id(2) * BLOCKS
    end = tl.minimum(pos // SEL_BLOCK - NUM_LOCAL + 1, pitch)
    if (high < pos) | (first >= end):
        return
    token = (token_of_zero + pos).to(tl.int64)
    offs_g = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_g = offs_g < GROUP
    head = (kv_head * GROUP + offs_g).to(tl.int64)
    q = tl.load(
        q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :],
        mask=mask_g[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_G, BLOCK_D]
    row = token * tl.num_programs(1) * GROUP + head
    lse = tl.load(lse_ptr + row, mask=mask_g, other=float("inf"))  # [BLOCK_G]
    block = first * CELLS - (REACH - 1) + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    inside = (block >= 0) & (block < compressed_visible(pos, CMP_BLOCK, CMP_STRIDE))
    k = _compressed_rows(
        k_ptr + kv_head.to(tl.int64) * stride_kh,
        block_table_ptr + request.to(tl.int64) * stride_br,
        block, inside, offs_d, stride_kp, stride_kc, HEAD_DIM, REACH, ROWS_PER_PAGE,
    )  # fmt: skip
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_C, BLOCK_G]
    p = tl.exp2((scores * scale - lse[None, :]) * 1.4426950408889634)
    mass = tl.sum(tl.where(inside[:, None] & mask_g[None, :], p, 0.0), 1)  # [BLOCK_C]
    offs_b = tl.arange(0, BLOCK_B)  # [BLOCK_B]
    cell = ((first + offs_b) * CELLS)[:, None]  # [BLOCK_B, 1]
    last = tl.minimum(block[None, :] + REACH, cell + CELLS)
    shared = tl.maximum(last - tl.maximum(block[None, :], cell), 0)  # [BLOCK_B, BLOCK_C]
    found = tl.sum(shared.to(tl.float32) * mass[None, :], 1)  # [BLOCK_B]
    out = scores_ptr + (token * tl.num_programs(1) + kv_head) * pitch
    tl.store(out + first + offs_b, found, mask=(offs_b < BLOCKS) & (first + offs_b < end))

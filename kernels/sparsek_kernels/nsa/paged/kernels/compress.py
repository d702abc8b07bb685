"""Compression in a decode step: the key or value of each block that a decoded token completes.

Compressed block ``c`` covers tokens ``c d .. c d + l - 1``.  It is stored in the page and stride in
which it ends, row ``c + l / d - 1`` of its sequence.
"""

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.tiles import tile_span


@triton.jit
def _raw_row(
    raw_ptr, table_ptr,
    token, rope_freqs,
    stride_rp, stride_rh, stride_rt,
    offs_h, offs_d, mask_h,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
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
        angle = token.to(tl.float32) * rope_freqs  # [BLOCK_D]
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
    k_cmp_ptr, v_cmp_ptr, hidden_ptr, turn_ptr, ticket_ptr, k_raw_ptr, v_raw_ptr, k_w1_ptr,
    v_w1_ptr, k_constant_ptr, v_constant_ptr, k_w2_ptr, v_w2_ptr, k_b2_ptr, v_b2_ptr,
    rope_freqs_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    stride_kcp, stride_kch, stride_kcc,
    stride_vcp, stride_vch, stride_vcc,
    stride_krp, stride_krh, stride_krt,
    stride_vrp, stride_vrh, stride_vrt,
    stride_br,
    TILES_PER_REQUEST: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HIDDEN: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_PHI: tl.constexpr, HAS_ROPE: tl.constexpr, ROTATED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    LAST_F: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: a share of the key or of the value of the block that one decoded token
    completes, if it does, all KV heads.

    ``y = gelu(sum_t x_t W1[t] + constant) W2 + b2`` (arXiv 2502.11089, equation 7), or the mean;
    keys are rotated by the position of the block's first token with ``HAS_ROPE``.  ``constant
    [HIDDEN]`` is ``vec(position) W1 + b1``.  The share is ``CMP_BLOCK / PARTS`` tokens times
    ``BLOCK_F`` columns of W1; the program that draws the last ticket adds the shares up, in order.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    is_value = tl.program_id(2) == 1
    request, _base, pos, high, _zero = tile_span(
        tile, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    start = pos + 1 - CMP_BLOCK
    if (high < pos) | (start < 0) | (start % CMP_STRIDE != 0):
        return
    raw_ptr = tl.where(is_value, v_raw_ptr, k_raw_ptr)
    stride_rp = tl.where(is_value, stride_vrp, stride_krp)
    stride_rh = tl.where(is_value, stride_vrh, stride_krh)
    stride_rt = tl.where(is_value, stride_vrt, stride_krt)
    table = block_table_ptr + request.to(tl.int64) * stride_br
    place = (tile * 2 + tl.program_id(2)).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)  # [BLOCK_H]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_h = offs_h < NUM_HEADS
    mask_d = offs_d < HEAD_DIM
    partner_d = (offs_d + HEAD_DIM // 2) % HEAD_DIM
    rope_freqs = tl.zeros([BLOCK_D], dtype=tl.float32)  # values are turned by nothing
    if HAS_ROPE:
        turned = mask_d & (tl.program_id(2) == 0)
        rope_freqs = tl.load(rope_freqs_ptr + offs_d % (HEAD_DIM // 2), mask=turned, other=0.0)
        # By way of memory: the tile that is turned has each angle in many threads.
        turns = turn_ptr + place * 2 * BLOCK_D + offs_d
        if tl.program_id(1) == 0:
            angle = start.to(tl.float32) * rope_freqs
            tl.store(turns, tl.cos(angle))
            tl.store(turns + BLOCK_D, tl.where(offs_d < HEAD_DIM // 2, -1.0, 1.0) * tl.sin(angle))
    y = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    z = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    if HAS_PHI:
        w1_ptr = tl.where(is_value, v_w1_ptr, k_w1_ptr)
        w2_ptr = tl.where(is_value, v_w2_ptr, k_w2_ptr)
        b2_ptr = tl.where(is_value, v_b2_ptr, k_b2_ptr)
        constant_ptr = tl.where(is_value, v_constant_ptr, k_constant_ptr)
        TOKENS: tl.constexpr = CMP_BLOCK // PARTS
        COLUMNS: tl.constexpr = (HIDDEN + BLOCK_F - 1) // BLOCK_F
        part = tl.program_id(1) // COLUMNS
        offs_f = tl.program_id(1) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
        mask_f = offs_f < HIDDEN
        hidden = tl.zeros([BLOCK_H, BLOCK_F], dtype=tl.float32)
        for t in tl.range(part * TOKENS, part * TOKENS + TOKENS, num_stages=NUM_STAGES):
            x, _partner = _raw_row(
                raw_ptr, table, start + t, rope_freqs, stride_rp, stride_rh, stride_rt,
                offs_h, offs_d, mask_h, HEAD_DIM, PAGE_SIZE, ROTATED,
            )  # fmt: skip
            w1 = tl.load(
                w1_ptr + (t * HEAD_DIM + offs_d)[:, None] * HIDDEN + offs_f[None, :],
                mask=mask_d[:, None] & mask_f[None, :],
                other=0.0,
            )  # [BLOCK_D, BLOCK_F]
            hidden = tl.dot(x, w1, hidden, input_precision=PRECISION)
        shares = hidden_ptr + place * (PARTS + 1) * NUM_HEADS * HIDDEN
        shares += offs_h[:, None] * HIDDEN
        own = shares + part * NUM_HEADS * HIDDEN + offs_f[None, :]
        tl.store(own, hidden, mask=mask_h[:, None] & mask_f[None, :])
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel")
        if ticket != PARTS * COLUMNS - 1:
            return
        tl.store(ticket_ptr + place, 0)
        for first in tl.range(0, HIDDEN, LAST_F, num_stages=1):
            offs_l = first + tl.arange(0, LAST_F)
            mask_l = offs_l < HIDDEN
            w2_rows = w2_ptr + offs_l[:, None] * HEAD_DIM
            mask_w = mask_l[:, None] & mask_d[None, :]
            w2 = tl.load(w2_rows + offs_d[None, :], mask=mask_w, other=0.0)  # [LAST_F, BLOCK_D]
            if HAS_ROPE:
                partner_w2 = tl.load(w2_rows + partner_d[None, :], mask=mask_w, other=0.0)
            mask = mask_h[:, None] & mask_l[None, :]
            whole = tl.zeros([BLOCK_H, LAST_F], dtype=tl.float32)
            for p in tl.static_range(PARTS):
                share = shares + p * NUM_HEADS * HIDDEN + offs_l[None, :]
                whole += tl.load(share, mask=mask, other=0.0, cache_modifier=".cg")
            whole += tl.load(constant_ptr + offs_l, mask=mask_l, other=0.0)[None, :]
            whole = 0.5 * whole * (1.0 + tl.erf(whole * 0.7071067811865476))
            # By way of memory: as an operand of the product every warp would have all of it.
            share = shares + PARTS * NUM_HEADS * HIDDEN + offs_l[None, :]
            tl.store(share, whole, mask=mask)
            tl.debug_barrier()
            whole = tl.load(share, mask=mask, other=0.0, cache_modifier=".cg").to(w2.dtype)
            y = tl.dot(whole, w2, y, input_precision=PRECISION)
            if HAS_ROPE:
                z = tl.dot(whole, partner_w2, z, input_precision=PRECISION)
        y += tl.load(b2_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        z += tl.load(b2_ptr + partner_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    else:
        for t in range(CMP_BLOCK):
            x, partner = _raw_row(
                raw_ptr, table, start + t, rope_freqs, stride_rp, stride_rh, stride_rt,
                offs_h, offs_d, mask_h, HEAD_DIM, PAGE_SIZE, ROTATED,
            )  # fmt: skip
            y += x.to(tl.float32)
            z += partner.to(tl.float32)
        y = y / CMP_BLOCK
        z = z / CMP_BLOCK
    if HAS_ROPE:
        tl.debug_barrier()
        cos = tl.load(turns, cache_modifier=".cg")[None, :]
        y = y * cos + z * tl.load(turns + BLOCK_D, cache_modifier=".cg")[None, :]
    page = tl.load(table + pos // PAGE_SIZE).to(tl.int64)
    row = tl.where(is_value, v_cmp_ptr, k_cmp_ptr) + page * tl.where(
        is_value, stride_vcp, stride_kcp
    )
    row += (pos % PAGE_SIZE) // CMP_STRIDE * tl.where(is_value, stride_vcc, stride_kcc)
    stride_ch = tl.where(is_value, stride_vch, stride_kch)
    tl.store(
        row + offs_h.to(tl.int64)[:, None] * stride_ch + offs_d[None, :],
        y.to(k_cmp_ptr.dtype.element_ty),
        mask=mask_h[:, None] & mask_d[None, :],
    )

"""Storing new keys and values in a paged cache, with the summaries of the cells they touch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    summary_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    k_inv_scale,
    v_inv_scale,
    num_tokens,
    stride_cp,
    stride_ch,
    stride_ct,
    stride_vp,
    stride_vh,
    stride_vt,
    stride_sp,
    stride_sh,
    stride_sc,
    stride_kt,
    stride_kh,
    stride_xt,
    stride_xh,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CELL: tl.constexpr,
    HAS_SUMMARY: tl.constexpr,
    MIN_MAX: tl.constexpr,
):
    """One program: one token, ``BLOCK_H`` KV heads.

    The token that comes last of its cell in this batch also writes the cell's summary: the mean of
    the cell's rows up to its own (``CELL`` = 16), or their minimum and maximum (``CELL`` = 32).
    Rows of this batch are read from the inputs, since their own programs may not have stored them
    yet, and rounded as those store them; earlier rows come from the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if HAS_SUMMARY:
        # Here, and K and V stored last: no load waits for another one that it does not need.
        back = tl.arange(0, CELL)
        source = token - back
        source_slot = tl.load(slot_ptr + source, mask=source >= 0, other=-1)
        next_slot = tl.load(slot_ptr + token + 1, mask=token + 1 < num_tokens, other=-1)
    if slot < 0:
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_h < NUM_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
    head = offs_h.to(tl.int64)[:, None]
    page = slot // PAGE_SIZE
    row = slot % PAGE_SIZE
    k_page = k_cache_ptr + page * stride_cp + head * stride_ch + offs_d[None, :]
    v_page = v_cache_ptr + page * stride_vp + head * stride_vh + offs_d[None, :]
    k = tl.load(k_ptr + token * stride_kt + head * stride_kh + offs_d[None, :], mask=mask)
    v = tl.load(v_ptr + token * stride_xt + head * stride_xh + offs_d[None, :], mask=mask)

    if HAS_SUMMARY:
        in_cell = slot % CELL
        if (next_slot != slot + 1) | (in_cell == CELL - 1):
            live = back <= in_cell
            fresh = live & (source >= 0) & (source_slot == slot - back)
            mask3 = mask[None, :, :]  # [CELL, BLOCK_H, BLOCK_D]
            new = tl.load(
                k_ptr
                + source[:, None, None] * stride_kt
                + (head * stride_kh + offs_d[None, :])[None, :, :],
                mask=mask3 & fresh[:, None, None],
                other=0.0,
            )
            old = tl.load(
                k_page[None, :, :] + (row - back)[:, None, None] * stride_ct,
                mask=mask3 & (live & ~fresh)[:, None, None],
                other=0.0,
            )
            new = (new.to(tl.float32) * k_inv_scale).to(k_cache_ptr.dtype.element_ty)
            rows = tl.where(fresh[:, None, None], new.to(tl.float32), old.to(tl.float32))
            base = summary_ptr + page * stride_sp + head * stride_sh + offs_d[None, :]
            kind = summary_ptr.dtype.element_ty
            cell = row // CELL
            if MIN_MAX:
                low = tl.min(tl.where(live[:, None, None], rows, float("inf")), axis=0)
                high = tl.max(tl.where(live[:, None, None], rows, float("-inf")), axis=0)
                tl.store(base + 2 * cell * stride_sc, low.to(kind), mask=mask)
                tl.store(base + (2 * cell + 1) * stride_sc, high.to(kind), mask=mask)
            else:
                total = tl.sum(tl.where(live[:, None, None], rows, 0.0), axis=0)
                mean = total / (in_cell + 1).to(tl.float32)
                tl.store(base + cell * stride_sc, mean.to(kind), mask=mask)

    k = (k.to(tl.float32) * k_inv_scale).to(k_cache_ptr.dtype.element_ty)
    v = (v.to(tl.float32) * v_inv_scale).to(v_cache_ptr.dtype.element_ty)
    tl.store(k_page + row * stride_ct, k, mask=mask)
    tl.store(v_page + row * stride_vt, v, mask=mask)

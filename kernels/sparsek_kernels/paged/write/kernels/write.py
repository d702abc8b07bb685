"""Storing new keys and values in a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_ptr,
    k_inv_scale, v_inv_scale,
    stride_cp, stride_ch, stride_ct,
    stride_vp, stride_vh, stride_vt,
    stride_kt, stride_kh,
    stride_xt, stride_xh,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One program: one token, ``BLOCK_H`` KV heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
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
    k = (k.to(tl.float32) * k_inv_scale).to(k_cache_ptr.dtype.element_ty)
    v = (v.to(tl.float32) * v_inv_scale).to(v_cache_ptr.dtype.element_ty)
    tl.store(k_page + row * stride_ct, k, mask=mask)
    tl.store(v_page + row * stride_vt, v, mask=mask)

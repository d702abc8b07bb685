"""Rotary position embedding in one pass over the heads (arXiv 2104.09864, half-split pairs)."""

import triton
import triton.language as tl


@triton.jit
def nsa_rotary_kernel(
    out_ptr, x_ptr, positions_ptr, frequencies_ptr,
    stride_xb, stride_xt, stride_xh, stride_xd, stride_pb, stride_pt,
    num_tokens, num_heads, sign,
    HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_T`` tokens, ``BLOCK_H`` heads, which share the angles.

    ``out`` is contiguous; ``sign`` is 1, or -1 to rotate back.
    """
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    batch = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_t, mask_d = offs_t < num_tokens, offs_d < HALF
    token = offs_t.to(tl.int64)
    position = tl.load(positions_ptr + batch * stride_pb + token * stride_pt, mask=mask_t, other=0)
    frequency = tl.load(frequencies_ptr + offs_d, mask=mask_d, other=0.0)
    angle = (position * sign).to(tl.float32)[:, None] * frequency[None, :]  # [BLOCK_T, BLOCK_D]
    cos, sin = tl.cos(angle)[:, None, :], tl.sin(angle)[:, None, :]
    mask = mask_t[:, None, None] & (offs_h < num_heads)[None, :, None] & mask_d[None, None, :]
    head = offs_h.to(tl.int64)
    x_row = batch * stride_xb + token[:, None] * stride_xt + head[None, :] * stride_xh
    x_ptrs = x_ptr + x_row[:, :, None] + offs_d[None, None, :] * stride_xd
    first = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_H, BLOCK_D]
    second = tl.load(x_ptrs + HALF * stride_xd, mask=mask, other=0.0).to(tl.float32)
    out_row = (batch * num_tokens + token[:, None]) * num_heads + offs_h[None, :]
    out_ptrs = out_ptr + out_row[:, :, None] * (2 * HALF) + offs_d[None, None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptrs, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, (second * cos + first * sin).to(dtype), mask=mask)

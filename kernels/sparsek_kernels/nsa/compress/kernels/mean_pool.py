"""Mean pooling of tokens into overlapping blocks, forward and backward.

    y_c = 1/l sum_{i < l} x[c d + i],      dx_t = 1/l sum_{c : c d <= t < c d + l} dy_c

(arXiv 2502.11089, equation 7, with the mean as the map).
"""

import triton
import triton.language as tl


@triton.jit
def nsa_mean_pool_fwd_kernel(
    out_ptr, x_ptr, starts_ptr,
    stride_xb, stride_xt, stride_xh, stride_xd,
    num_cmp, num_heads,
    HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_C`` compressed blocks of one head; ``out`` is contiguous.

    ``starts`` holds the first token of each row of a packed batch, -1 for unused rows.
    """
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_c = offs_c < num_cmp
    used = mask_c
    if VARLEN:
        start = tl.load(starts_ptr + offs_c, mask=mask_c, other=-1)  # [BLOCK_C]
        used = start >= 0
    else:
        start = offs_c * CMP_STRIDE
    mask_d = offs_d < HEAD_DIM
    base = x_ptr + batch * stride_xb + head * stride_xh + offs_d[None, :] * stride_xd
    acc = tl.zeros([BLOCK_C, BLOCK_D], dtype=tl.float32)  # [BLOCK_C, BLOCK_D]
    # Loads that need not wait for one another, some at a time.
    TOGETHER: tl.constexpr = 16 if CMP_BLOCK % 16 == 0 else 1
    for first in range(0, CMP_BLOCK, TOGETHER):
        for i in tl.static_range(TOGETHER):
            row = (start + first + i).to(tl.int64) * stride_xt
            x = tl.load(base + row[:, None], mask=used[:, None] & mask_d[None, :], other=0.0)
            acc += x.to(tl.float32)
    out_row = (batch * num_cmp + offs_c) * num_heads + head
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + offs_d[None, :]
    acc = acc * (1.0 / CMP_BLOCK)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_c[:, None] & mask_d[None, :])


@triton.jit
def nsa_mean_pool_bwd_kernel(
    dx_ptr, dout_ptr, token_seq_ptr, cu_seqlens_ptr, cu_cmp_ptr,
    stride_gb, stride_gt, stride_gh, stride_gd,
    num_tokens, num_cmp, num_heads,
    HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_T`` tokens of one head gather the blocks that cover them."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_t = token < num_tokens
    mask_d = offs_d < HEAD_DIM
    if VARLEN:
        seq = tl.load(token_seq_ptr + token, mask=mask_t, other=0)
        pos = token - tl.load(cu_seqlens_ptr + seq, mask=mask_t, other=0)
        first = tl.load(cu_cmp_ptr + seq, mask=mask_t, other=0)
        count = tl.load(cu_cmp_ptr + seq + 1, mask=mask_t, other=0) - first
    else:
        pos = token
        first = token * 0
        count = first + num_cmp
    acc = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)  # [BLOCK_T, BLOCK_D]
    base = dout_ptr + batch * stride_gb + head * stride_gh + offs_d[None, :] * stride_gd
    for back in tl.static_range(CMP_BLOCK // CMP_STRIDE):
        block = pos // CMP_STRIDE - back
        mask = mask_t & (block >= 0) & (block < count)
        row = (first + block).to(tl.int64) * stride_gt
        grad = tl.load(base + row[:, None], mask=mask[:, None] & mask_d[None, :], other=0.0)
        acc += grad.to(tl.float32)
    dx_row = (batch * num_tokens + token) * num_heads + head
    dx_ptrs = dx_ptr + dx_row[:, None] * HEAD_DIM + offs_d[None, :]
    acc = acc * (1.0 / CMP_BLOCK)
    tl.store(dx_ptrs, acc.to(dx_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_d[None, :])

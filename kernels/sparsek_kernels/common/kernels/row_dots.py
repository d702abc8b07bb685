"""Row sums of the output with its gradient, the first pass of every backward (``delta``)."""

import triton
import triton.language as tl


@triton.jit
def row_dots_kernel(
    delta_ptr, out_ptr, dout_ptr, dlse_ptr,
    stride_ob, stride_ot, stride_oh, stride_od,
    stride_gb, stride_gt, stride_gh, stride_gd,
    num_q, num_heads,
    HEAD_DIM: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``delta[b, h, i] = sum_d out dout - dlse`` for ``BLOCK_M`` rows of one head."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < num_q
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    cols = offs_d[None, :]
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + rows * stride_ot + cols * stride_od
    g_ptrs = dout_ptr + batch * stride_gb + head * stride_gh + rows * stride_gt + cols * stride_gd
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(g_ptrs, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)  # [BLOCK_M]
    row_base = (batch * num_heads + head) * num_q + offs_m
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_base, mask=mask_m, other=0.0)
    tl.store(delta_ptr + row_base, delta, mask=mask_m)

"""The gated sum of three branches (arXiv 2502.11089, equation 5) and its gradient, elementwise."""

import triton
import triton.language as tl


@triton.jit
def nsa_gate_fwd_kernel(
    out_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    ga_ptr,
    gb_ptr,
    gc_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: ``BLOCK_R`` head vectors of contiguous branches and gates."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + offs_d[None, :]
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_D]
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + at, mask=mask, other=0.0).to(tl.float32)
    ga = tl.load(ga_ptr + row, mask=mask_r, other=0.0).to(tl.float32)  # [BLOCK_R]
    gb = tl.load(gb_ptr + row, mask=mask_r, other=0.0).to(tl.float32)
    gc = tl.load(gc_ptr + row, mask=mask_r, other=0.0).to(tl.float32)
    out = a * ga[:, None] + b * gb[:, None] + c * gc[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def nsa_gate_bwd_kernel(
    da_ptr,
    db_ptr,
    dc_ptr,
    dga_ptr,
    dgb_ptr,
    dgc_ptr,
    dout_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    ga_ptr,
    gb_ptr,
    gc_ptr,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_gd,
    num_rows,
    num_q,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: gradients of ``BLOCK_R`` head vectors; only ``dout`` may be strided."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    token = row // num_heads
    upstream = token // num_q * stride_gb + token % num_q * stride_gt + row % num_heads * stride_gh
    dout = tl.load(
        dout_ptr + upstream[:, None] + offs_d[None, :] * stride_gd, mask=mask, other=0.0
    ).to(tl.float32)  # [BLOCK_R, BLOCK_D]
    at = row[:, None] * HEAD_DIM + offs_d[None, :]
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_D]
    ga = tl.load(ga_ptr + row, mask=mask_r, other=0.0).to(tl.float32)  # [BLOCK_R]
    tl.store(dga_ptr + row, tl.sum(a * dout, 1).to(dga_ptr.dtype.element_ty), mask=mask_r)
    tl.store(da_ptr + at, (dout * ga[:, None]).to(da_ptr.dtype.element_ty), mask=mask)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gb = tl.load(gb_ptr + row, mask=mask_r, other=0.0).to(tl.float32)
    tl.store(dgb_ptr + row, tl.sum(b * dout, 1).to(dgb_ptr.dtype.element_ty), mask=mask_r)
    tl.store(db_ptr + at, (dout * gb[:, None]).to(db_ptr.dtype.element_ty), mask=mask)
    c = tl.load(c_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gc = tl.load(gc_ptr + row, mask=mask_r, other=0.0).to(tl.float32)
    tl.store(dgc_ptr + row, tl.sum(c * dout, 1).to(dgc_ptr.dtype.element_ty), mask=mask_r)
    tl.store(dc_ptr + at, (dout * gc[:, None]).to(dc_ptr.dtype.element_ty), mask=mask)

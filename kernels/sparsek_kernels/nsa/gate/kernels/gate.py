"""The gated sum of three branches (arXiv 2502.11089, equation 5) and its gradient, elementwise."""

import triton
import triton.language as tl


@triton.jit
def nsa_gate_fwd_kernel(
    out_ptr, a_ptr, b_ptr, c_ptr, ga_ptr, gb_ptr, gc_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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
    da_ptr, db_ptr, dc_ptr, dga_ptr, dgb_ptr, dgc_ptr, dout_ptr, a_ptr, b_ptr, c_ptr, ga_ptr,
    gb_ptr, gc_ptr,
    stride_gb, stride_gt, stride_gh, stride_gd,
    num_rows, num_q, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def _branch_rows(
    dgate_ptr, dots_ptr, folded_ptr, out_ptr, gate_ptr, lse_ptr,
    dout, row, stat, mask_r,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row sums, gate gradient and folded log-sum-exp of one branch."""
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + offs_d[None, :]
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [rows, BLOCK_D]
    dots = tl.sum(out * dout, 1)  # [rows]
    tl.store(dgate_ptr + row, dots.to(dgate_ptr.dtype.element_ty), mask=mask_r)
    tl.store(dots_ptr + stat, dots, mask=mask_r)
    gate = tl.load(gate_ptr + row, mask=mask_r, other=1.0).to(tl.float32)
    lse = tl.load(lse_ptr + stat, mask=mask_r, other=0.0)
    folded = tl.where(gate == 0.0, float("inf"), lse - tl.log(gate))
    tl.store(folded_ptr + stat, folded, mask=mask_r)


@triton.jit
def nsa_gate_rows_kernel(
    dga_ptr, dgb_ptr, dgc_ptr, dots_ptr, folded_ptr, dout_ptr, a_ptr, b_ptr, c_ptr, ga_ptr, gb_ptr,
    gc_ptr, lse_a_ptr, lse_b_ptr, lse_c_ptr,
    stride_gb, stride_gt, stride_gh, stride_gd,
    num_q, num_heads, num_stats,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: gradients of the gates for ``BLOCK_T`` tokens and ``BLOCK_H`` heads.

    For each branch it writes ``dg = sum_d dout o`` twice, as the gradient ``[B, N, Hq]`` and as
    fp32 ``dots [3, B, Hq, N]``, and ``folded = lse - ln g``, fp32 ``[3, B, Hq, N]``.  Only ``dout``
    may be strided.
    """
    offs_r = tl.arange(0, BLOCK_T * BLOCK_H)
    across = tl.cdiv(num_heads, BLOCK_H)  # programs of the same tokens follow one another
    token = tl.program_id(0) // across * BLOCK_T + offs_r // BLOCK_H
    head = tl.program_id(0) % across * BLOCK_H + offs_r % BLOCK_H
    batch = tl.program_id(1).to(tl.int64)
    mask_r = (token < num_q) & (head < num_heads)
    row = (batch * num_q + token) * num_heads + head
    stat = (batch * num_heads + head) * num_q + token
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    upstream = batch * stride_gb + token.to(tl.int64) * stride_gt + head.to(tl.int64) * stride_gh
    dout = tl.load(
        dout_ptr + upstream[:, None] + offs_d[None, :] * stride_gd,
        mask=mask_r[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)  # [BLOCK_T * BLOCK_H, BLOCK_D]
    _branch_rows(
        dga_ptr, dots_ptr, folded_ptr, a_ptr, ga_ptr, lse_a_ptr, dout, row, stat, mask_r,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    wide = num_stats.to(tl.int64)
    _branch_rows(
        dgb_ptr, dots_ptr + wide, folded_ptr + wide, b_ptr, gb_ptr, lse_b_ptr, dout, row, stat,
        mask_r, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    _branch_rows(
        dgc_ptr, dots_ptr + 2 * wide, folded_ptr + 2 * wide, c_ptr, gc_ptr, lse_c_ptr, dout, row,
        stat, mask_r, HEAD_DIM, BLOCK_D,
    )  # fmt: skip

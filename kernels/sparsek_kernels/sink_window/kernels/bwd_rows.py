"""The last pass of the fused backward kernel: dq from its fp32 sum."""

import triton
import triton.language as tl


@triton.jit
def sink_window_bwd_finish_kernel(
    dq_ptr, dq_acc_ptr,
    scale,
    stride_dqb, stride_dqt, stride_dqh,
    num_q, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dq = scale * dq_acc``, from fp32 ``[B, Hq, N, D]``, for ``BLOCK_M`` rows of one head."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = (offs_m < num_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    acc_rows = (batch * num_heads + head) * num_q + rows
    acc = tl.load(dq_acc_ptr + acc_rows * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
    dq_ptrs = dq_ptr + batch * stride_dqb + head * stride_dqh + rows * stride_dqt + offs_d[None, :]
    tl.store(dq_ptrs, (acc * scale).to(dq_ptr.dtype.element_ty), mask=mask)

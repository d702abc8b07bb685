"""The row sums that every backward pass of attention starts from."""

from __future__ import annotations

import torch

from sparsek_kernels.common.kernels.row_dots import row_dots_kernel
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv, next_power_of_2


def row_dots(dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``delta [B, Hq, N]`` fp32: row sums of ``out * dout``, less the gradient of the LSE."""
    batch, num_q, num_heads, dim = out.shape
    delta = torch.empty((batch, num_heads, num_q), dtype=torch.float32, device=out.device)
    block_d = max(16, next_power_of_2(dim))
    block_m = max(1, 8192 // block_d)
    run(
        row_dots_kernel, (cdiv(num_q, block_m), num_heads, batch),
        delta, out, dout, dlse.contiguous() if dlse is not None else delta,
        *out.stride(), *dout.stride(),
        num_q, num_heads,
        HEAD_DIM=dim, HAS_DLSE=dlse is not None, BLOCK_M=block_m, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return delta

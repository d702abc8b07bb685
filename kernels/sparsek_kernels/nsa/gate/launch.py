"""Launches of the gated sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from sparsek_kernels.nsa.gate.kernels.gate import nsa_gate_bwd_kernel, nsa_gate_fwd_kernel


def _tile(head_dim: int) -> tuple[int, int]:
    block_d = max(16, triton.next_power_of_2(head_dim))
    return max(1, 4096 // block_d), block_d


def forward(
    out: torch.Tensor, branches: Sequence[torch.Tensor], gates: Sequence[torch.Tensor]
) -> None:
    """Fill contiguous ``out [B, N, Hq, D]``."""
    rows, head_dim = out.numel() // out.shape[-1], out.shape[-1]
    if rows == 0:
        return
    block_r, block_d = _tile(head_dim)
    nsa_gate_fwd_kernel[(triton.cdiv(rows, block_r),)](
        out,
        *(x.contiguous() for x in (*branches, *gates)),
        rows,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=4,
    )


def backward(
    grads: Sequence[torch.Tensor],
    dout: torch.Tensor,
    branches: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
) -> None:
    """Fill contiguous gradients of the three branches and then of the three gates."""
    _, num_q, num_heads, head_dim = dout.shape
    rows = dout.numel() // head_dim
    if rows == 0:
        return
    block_r, block_d = _tile(head_dim)
    nsa_gate_bwd_kernel[(triton.cdiv(rows, block_r),)](
        *grads,
        dout,
        *(x.contiguous() for x in (*branches, *gates)),
        *dout.stride(),
        rows,
        num_q,
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=4,
    )

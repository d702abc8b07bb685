"""Launches of the gated sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsek_kernels.common.operators import new_like
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv, next_power_of_2
from sparsek_kernels.nsa.config import row_tile
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.gate.kernels.gate import (
    nsa_gate_bwd_kernel,
    nsa_gate_fwd_kernel,
    nsa_gate_rows_kernel,
)

_ROWS_TOKENS = 8  # tokens of a program of the row sums: it writes 32 bytes of a statistic


def forward(out: torch.Tensor, outs: Sequence[torch.Tensor], gates: Sequence[torch.Tensor]) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` with the sum of ``gates [B, N, Hq]`` times ``outs``."""
    rows, head_dim = out.numel() // out.shape[-1], out.shape[-1]
    if rows == 0:
        return
    block_r, block_d = row_tile(head_dim)
    run(
        nsa_gate_fwd_kernel, (cdiv(rows, block_r),),
        out, *(x.contiguous() for x in (*outs, *gates)), rows,
        HEAD_DIM=head_dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def backward(
    douts: Sequence[torch.Tensor],
    dgates: Sequence[torch.Tensor],
    dout: torch.Tensor,
    outs: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
) -> None:
    """Fill contiguous gradients of ``outs`` and of ``gates``."""
    _, num_q, num_heads, head_dim = dout.shape
    rows = dout.numel() // head_dim
    if rows == 0:
        return
    block_r, block_d = row_tile(head_dim)
    run(
        nsa_gate_bwd_kernel, (cdiv(rows, block_r),),
        *douts, *dgates, dout, *(x.contiguous() for x in (*outs, *gates)),
        *dout.stride(),
        rows, num_q, num_heads,
        HEAD_DIM=head_dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def gate_rows(
    dout: torch.Tensor, outs: PerBranch, gates: PerBranch, lses: PerBranch
) -> tuple[PerBranch, PerBranch, PerBranch]:
    """``(dgates, delta, lse - ln gate)`` of each branch; the last two fp32 ``[B, Hq, N]``.

    ``delta`` holds the row sums of ``out * dout``.  ``outs`` and ``lses`` are contiguous.
    """
    batch, num_q, num_heads, head_dim = dout.shape
    delta = torch.empty((3, batch, num_heads, num_q), dtype=torch.float32, device=dout.device)
    folded = torch.empty_like(delta)
    dgates = PerBranch(*map(new_like, gates))
    block_d = max(16, next_power_of_2(head_dim))
    block_h = max(8192 // block_d // _ROWS_TOKENS, 1)
    tiles = cdiv(num_q, _ROWS_TOKENS) * cdiv(num_heads, block_h)
    run(
        nsa_gate_rows_kernel, (tiles, batch),
        *dgates, delta, folded, dout, *outs, *(x.contiguous() for x in gates), *lses,
        *dout.stride(),
        num_q, num_heads, batch * num_heads * num_q,
        HEAD_DIM=head_dim, BLOCK_T=_ROWS_TOKENS, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=8,
    )  # fmt: skip
    return dgates, PerBranch(*delta), PerBranch(*folded)

"""What the operators of attention share: kernels or torch, and the tensors that they return."""

from __future__ import annotations

import torch

from sparsek_kernels.checks import FLOAT_DTYPES
from sparsek_kernels.common.precision import compute_dtype


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether Triton kernels take such inputs (else torch operations do)."""
    return x.is_cuda and x.dtype in FLOAT_DTYPES


def new_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised contiguous tensor with the shape, dtype and device of ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised log-sum-exp ``[B, Hq, N]`` for queries ``q [B, N, Hq, D]``."""
    batch, num_q, num_heads, _ = q.shape
    return q.new_empty((batch, num_heads, num_q), dtype=compute_dtype(q.dtype))

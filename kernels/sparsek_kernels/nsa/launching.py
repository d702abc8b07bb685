"""Sizes and launch parameters of a call."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import device_arch
from sparsek_kernels.nsa.config import LaunchConfig, ProblemShape, select_config


def problem_shape(q: torch.Tensor, num_kv_heads: int, num_k: int) -> ProblemShape:
    """Sizes of a call with queries ``q [B, N, Hq, D]``."""
    return ProblemShape(q.shape[0], q.shape[1], num_k, q.shape[2], num_kv_heads, q.shape[3])


def launch_config(q: torch.Tensor, shape: ProblemShape, top_n: int) -> LaunchConfig:
    """The table's configuration for ``q``'s dtype and device."""
    return select_config(shape, top_n, q.dtype, device_arch(q.device))

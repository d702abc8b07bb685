"""Argument checks of ``block_sparse_attention``: each failure names what came and what was due."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.block_sparse.structure import BlockStructure, structure_of
from sparsek_kernels.checks import FLOAT_DTYPES, check_heads, check_scale, check_tensor

DTYPES = (*FLOAT_DTYPES, torch.float64)
MAX_HEAD_DIM = 256


def check_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, softmax_scale: float | None
) -> tuple[BlockStructure, float]:
    """Validate one call; returns the pattern's structure and the scale.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    check_tensor("q", q, ("B", "N", "Hq", "D"), DTYPES)
    dim = q.shape[3]
    check_tensor("k", k, (q.shape[0], "M", "Hkv", dim), (q.dtype,), q.device)
    check_tensor("v", v, (q.shape[0], k.shape[1], k.shape[2], dim), (q.dtype,), q.device)
    check_heads(q.shape[2], k.shape[2])
    if not 1 <= dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected head_dim from 1 to {MAX_HEAD_DIM}, got {dim}")
    scale = check_scale(softmax_scale, dim)
    structure = structure_of(pattern, k.shape[1])
    reason = misfit(structure, q.shape[1], k.shape[1], q.shape[2], q.device)
    if reason is not None:
        raise ValueError(f"pattern: {reason}")
    return structure, scale


def misfit(
    structure: BlockStructure, num_q: int, num_k: int, num_heads: int, device: torch.device
) -> str | None:
    """Why a pattern does not fit a call, or ``None`` where it does."""
    size = structure.block_size
    needed = (-(-num_q // size), -(-num_k // size))
    if structure.shape != needed:
        return (
            f"expected {needed[0]} x {needed[1]} blocks of {size} for {num_q} queries and "
            f"{num_k} keys, got {structure.shape[0]} x {structure.shape[1]}"
        )
    if num_heads % structure.num_patterns:
        return (
            f"expected a number of patterns that divides {num_heads} query heads, "
            f"got {structure.num_patterns}"
        )
    if structure.device != device:
        return f"expected the device of q, {device}, got {structure.device}"
    return None

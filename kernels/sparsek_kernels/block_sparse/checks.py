"""Argument checks of ``block_sparse_attention``: each error says what was due and what came."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.block_sparse.structure import BlockStructure, structure_of
from sparsek_kernels.checks import check_qkv, check_scale, check_tensor
from sparsek_kernels.common.dropout import drop_threshold


def check_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, softmax_scale: float | None
) -> tuple[BlockStructure, float]:
    """The structure of the pattern and the scale, after the arguments were checked."""
    check_qkv(q, k, v)
    scale = check_scale(softmax_scale, q.shape[3])
    structure = structure_of(pattern, k.shape[1])
    reason = misfit(structure, q.shape[1], k.shape[1], q.shape[2], q.device)
    if reason is not None:
        raise ValueError(f"pattern: {reason}")
    return structure, scale


def check_options(
    q: torch.Tensor,
    k: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
) -> torch.Tensor | None:
    """The state that dropout draws from, ``None`` without dropout, after the options were checked.

    A state that is not given is drawn from torch's generator of the device.
    """
    batch, num_q = q.shape[:2]
    for name, mask, tokens in (
        ("key_mask", key_mask, k.shape[1]),
        ("query_mask", query_mask, num_q),
    ):
        if mask is not None:
            check_tensor(name, mask, (batch, tokens), (torch.bool,), q.device)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: expected a float, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected a probability below 1, got {dropout_p}")
    if rng_state is not None:
        check_tensor("rng_state", rng_state, (2,), (torch.int64,), q.device)
    if drop_threshold(dropout_p) == 0:
        return None
    if rng_state is None:
        return torch.randint(2**62, (2,), device=q.device)
    return rng_state


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

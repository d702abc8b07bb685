"""Causal attention of whole sequences under a selection policy, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch

from sparsek_backend.transformers_op.topk import attend_selected, attend_selected_with_gradient
from sparsek_kernels import sink_flash_attention
from sparsek_kernels.paged.policy import SelectionPolicy


def rows_that_see_all(policy: SelectionPolicy, num_q: int, num_k: int) -> int:
    """How many of the first queries see every earlier key, queries being the last ``num_q``."""
    low, high = 0, num_q
    while low < high:
        middle = (low + high) // 2
        if policy.sees_all(num_k - num_q + middle):
            low = middle + 1
        else:
            high = middle
    return low


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of equally long sequences without padding.

    Args:
        q: ``[B, N, Hq, D]``, the last N tokens.
        k, v: ``[B, M, Hkv, D]``.
        policy: what a query attends.
        softmax_scale: factor of ``q . k``.
        sinks: ``[Hq]`` learned logits of the denominator, or ``None``.

    Returns:
        ``[B, N, Hq, D]``.
    """
    num_q, num_k = q.shape[1], k.shape[1]
    dense = rows_that_see_all(policy, num_q, num_k)
    if policy.selects_blocks and num_q == 1:
        dense = int(policy.per_token().sees_all(num_k - 1))
    if dense == num_q:
        return _flash(q, k, v, SelectionPolicy(), softmax_scale, sinks)
    if not policy.selects_blocks and policy.dense_below <= (policy.window_size or 0):
        return _flash(q, k, v, policy, softmax_scale, sinks)
    if policy.selects_blocks and not _needs_gradient(q, k, v, sinks):
        return attend_selected(q, k, v, policy, softmax_scale, sinks)
    parts = []
    if dense:
        seen = num_k - num_q + dense
        parts.append(
            _flash(q[:, :dense], k[:, :seen], v[:, :seen], SelectionPolicy(), softmax_scale, sinks)
        )
    rest = q[:, dense:]
    if policy.selects_blocks:
        last = min(policy.dense_last, num_q - dense) if num_q > 1 else 0
        if last < num_q - dense:
            parts.append(
                attend_selected_with_gradient(rest, k, v, policy, softmax_scale, sinks, last)
            )
        if last:
            parts.append(_flash(q[:, -last:], k, v, SelectionPolicy(), softmax_scale, sinks))
    else:
        parts.append(_flash(rest, k, v, policy, softmax_scale, sinks))
    return torch.cat(parts, dim=1)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of packed sequences: :func:`attend` with ``B = 1`` and token offsets.

    Args:
        q: ``[1, T, Hq, D]``; k, v: ``[1, S, Hkv, D]``.
        starts_q: offsets of the sequences' queries, the end included; starts_k: of their keys.
    """
    if not policy.selects_blocks and (policy.is_dense or policy.dense_below == 0):
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(starts, dtype=torch.int32, device=q.device)
            for starts in (starts_q, starts_k)
        )
        return _flash(q, k, v, policy, softmax_scale, sinks, cu_seqlens_q, cu_seqlens_k)
    parts = [
        attend(q[:, q_lo:q_hi], k[:, k_lo:k_hi], v[:, k_lo:k_hi], policy, softmax_scale, sinks)
        for (q_lo, q_hi), (k_lo, k_hi) in zip(pairwise(starts_q), pairwise(starts_k), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    out = sink_flash_attention(
        q,
        k,
        v,
        num_sink=policy.num_sink,
        window_size=policy.window_size,
        sinks=sinks,
        softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    return cast(torch.Tensor, out)

"""Causal attention of whole sequences under a selection policy, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch

from sparsek_backend.transformers_op.topk import (
    AttentionRule,
    attend_selected,
    attend_selected_with_gradient,
)
from sparsek_kernels import sink_flash_attention
from sparsek_kernels.paged.plan import split_queries
from sparsek_kernels.paged.policy import SelectionPolicy


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attention ``[B, N, Hq, D]`` of equally long sequences without padding.

    Args:
        q: ``[B, N, Hq, D]``, the last N tokens.
        k, v: ``[B, M, Hkv, D]``.
        rule: what a query attends.
    """
    needs_gradient = _needs_gradient(q, k, v, rule.sinks)
    if needs_gradient:
        rule = rule.with_gradient()
    num_q, num_k, policy = q.shape[1], k.shape[1], rule.of(q.shape[1])
    first, last = split_queries(policy, num_q, num_k)
    if first == last:
        return flash_attend(q, k, v, rule.dense())
    if _is_flash_mask(policy):
        return flash_attend(q, k, v, rule)
    if policy.selects_blocks and not needs_gradient:
        return attend_selected(q, k, v, rule)

    def attend_rows(begin: int, end: int, rule: AttentionRule) -> torch.Tensor:
        seen = num_k - num_q + end
        return flash_attend(q[:, begin:end], k[:, :seen], v[:, :seen], rule)

    parts = []
    if first:
        parts.append(attend_rows(0, first, rule.dense()))
    if policy.selects_blocks:
        parts.append(attend_selected_with_gradient(q[:, first:], k, v, rule, num_q - last))
    else:
        parts.append(attend_rows(first, last, rule))
    if last < num_q:
        parts.append(attend_rows(last, num_q, rule.dense()))
    return torch.cat(parts, dim=1)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention of packed sequences: :func:`attend` with ``B = 1`` and token offsets.

    Args:
        q: ``[1, T, Hq, D]``; k, v: ``[1, S, Hkv, D]``.
        starts_q: offsets of the sequences' queries, the end included; starts_k: of their keys.
    """
    if all(_is_flash_mask(one) for one in (rule.policy.prefill, rule.policy.decode)):
        return flash_attend(q, k, v, rule, (starts_q, starts_k))
    parts = [
        attend(q[:, q_lo:q_hi], k[:, k_lo:k_hi], v[:, k_lo:k_hi], rule)
        for (q_lo, q_hi), (k_lo, k_hi) in zip(pairwise(starts_q), pairwise(starts_k), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_flash_mask(policy: SelectionPolicy) -> bool:
    """Whether :func:`sink_flash_attention` has this policy's mask at any length."""
    if policy.window_size is None:
        return True
    chooses = policy.selects_blocks or policy.dense_last > 0
    return not chooses and policy.dense_below <= policy.window_size


def flash_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: AttentionRule,
    starts: tuple[Sequence[int], Sequence[int]] | None = None,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Attention under the sinks and window of a rule.

    Args:
        q: ``[B, N, Hq, D]``; k, v: ``[B, M, Hkv, D]``.
        starts: offsets of packed queries and of packed keys, the end included.
    """
    policy = rule.of(q.shape[1])
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(x, dtype=torch.int32, device=q.device) if x is not None else None
        for x in starts or (None, None)
    )
    out = sink_flash_attention(
        q,
        k,
        v,
        num_sink=policy.num_sink,
        window_size=policy.window_size,
        causal=causal,
        sinks=rule.sinks,
        softmax_scale=rule.softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    return cast(torch.Tensor, out)

"""Exact attention in torch for masks, biases, soft caps and dropout that no kernel takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Without cuDNN: under a mask its gradients can be NaN (pytorch issue 196678).
_MASKED_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_QUERY_ROWS = 256


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    position_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention under a mask, ``[B, N, Hq, Dv]``; zeros for queries that see no key.

    Args:
        q: ``[B, N, Hq, D]``.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, Dv]``.
        mask: bool (True is seen) or additive, broadcastable to ``[B, Hq, N, M]``.
        scale: factor of ``q . k``.
        position_bias: added to the logits, broadcastable as the mask is.
        dropout: probability of dropping a weight.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before mask and bias (Gemma 2).
        sinks: ``[Hq]`` learned logits that join the denominator only.
    """
    group = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    if mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    bias = mask
    if position_bias is not None:
        bias = _add(position_bias.to(q.dtype), mask)
    lowest = torch.finfo(q.dtype).min
    seen = mask if mask.dtype == torch.bool else mask > lowest
    dead = ~seen.any(dim=-1, keepdim=True)
    if softcap is None:
        out = _sdpa(q, k, v, bias, scale, dropout, sinks)
    else:
        out = _capped(q, k, v, bias, scale, dropout, softcap, sinks)
    return out.masked_fill(dead, 0.0).transpose(1, 2).contiguous()


def _add(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits under a mask, boolean or additive."""
    if mask.dtype == torch.bool:
        return torch.where(mask, logits, float("-inf"))
    return logits + mask


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    dropout: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """PyTorch's SDPA; a sink is one more key with its logit as the bias and no value."""
    if sinks is not None:
        shape = *q.shape[:3], k.shape[2]
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        column = sinks.to(q.dtype)[None, :, None, None].expand(*shape[:3], 1)
        bias = _add(q.new_zeros(()), bias).expand(shape)
        bias = torch.cat([bias, column], dim=-1)
    with sdpa_kernel(_MASKED_SDPA):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale
        )


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    dropout: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention of capped logits, which SDPA has no argument for, query rows in blocks."""
    bias = bias.expand(*q.shape[:3], k.shape[2])
    parts = []
    for rows in (slice(x, x + _QUERY_ROWS) for x in range(0, q.shape[2], _QUERY_ROWS)):
        logits = torch.matmul(q[:, :, rows].float(), k.float().mT) * scale
        logits = _add(softcap * torch.tanh(logits / softcap), bias[:, :, rows])
        if sinks is not None:
            column = sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], dim=-1)
        # A row without keys would be NaN, in its gradient too.
        empty = (logits == float("-inf")).all(dim=-1, keepdim=True)
        weights = torch.softmax(logits.masked_fill(empty, 0.0), dim=-1)[..., : k.shape[2]]
        parts.append(torch.matmul(F.dropout(weights, dropout).to(v.dtype), v))
    return torch.cat(parts, dim=2)

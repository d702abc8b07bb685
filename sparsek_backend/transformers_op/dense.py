"""Exact attention in torch for masks, biases, soft caps and dropout that no kernel takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek_kernels.fallback import softmax_attention, under_mask

# Without cuDNN: under a mask its gradients can be NaN (pytorch issue 196678).
MASKED_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
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
        position_bias: added to the logits, broadcastable as the mask is.
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
        bias = under_mask(position_bias.to(q.dtype), mask)
    lowest = torch.finfo(q.dtype).min
    seen = mask if mask.dtype == torch.bool else mask > lowest
    dead = ~seen.any(dim=-1, keepdim=True)
    if softcap is None:
        out = _sdpa(q, k, v, bias, scale, dropout, sinks)
    else:
        bias = bias.expand(*q.shape[:3], k.shape[2])
        options: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "dropout": dropout}
        rows = [slice(first, first + _QUERY_ROWS) for first in range(0, q.shape[2], _QUERY_ROWS)]
        parts = [softmax_attention(q[:, :, x], k, v, bias[:, :, x], scale, **options) for x in rows]
        out = torch.cat(parts, dim=2)
    return out.masked_fill(dead, 0.0).transpose(1, 2).contiguous()


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
        bias = under_mask(q.new_zeros(()), bias).expand(shape)
        bias = torch.cat([bias, column], dim=-1)
    with sdpa_kernel(MASKED_SDPA):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale
        )

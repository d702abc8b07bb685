"""The attention function that Transformers calls for ``attn_implementation="sparsek"``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek_backend.transformers_op.policy import policy_of
from sparsek_backend.transformers_op.sequences import attend, attend_packed
from sparsek_kernels import sink_flash_attention
from sparsek_kernels.fallback import count_fallback, sdpa_fallback
from sparsek_kernels.paged.policy import SelectionPolicy

# Without cuDNN: under a mask its gradients can be NaN (pytorch issue 196678).
_MASKED_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sparsek_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    cache: object = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend under the model's settings (:func:`configure`), or its own sliding window.

    Native: causal with and without padding, packed sequences (``cu_seq_lens_*``, or
    ``position_ids`` that start over), grouped heads, sliding windows, learned sinks, and full
    attention.  Custom 4-D masks, position biases, soft caps and dropout are served exactly and
    densely by torch; each reason is logged once and counted.

    Args:
        module: the layer; ``module.config``, ``module.layer_idx`` and ``module.is_causal`` count.
        query: ``[B, Hq, N, D]``.
        key: ``[B, Hkv, M, D]``, M >= N; value likewise, with any head dim up to D.
        attention_mask: what :func:`sparsek_mask` returned, or a 4-D mask, boolean or additive.
        scaling: factor of ``q . k``, ``D ** -0.5`` by default.
        sliding_window: keys that a query of this layer sees, its own included.
        s_aux: ``[Hq]`` learned sink logits.

    Returns:
        ``[B, N, Hq, Dv]`` and ``None`` (no attention weights exist).

    Raises:
        NotImplementedError: a cache of Transformers' continuous batching, or sinks with a full
            mask and a soft cap.
    """
    if cache is not None:
        raise NotImplementedError(
            "cache: Transformers' continuous batching is not supported; serve with vLLM, or use "
            "model.generate with attn_implementation='sparsek'"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    offsets = _packed_offsets(q, k, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    if offsets is not None:
        attention_mask = None
    policy = policy_of(module, sliding_window) if causal else SelectionPolicy()
    wide = attention_mask is not None and attention_mask.dim() == 4
    if wide or position_bias is not None or dropout > 0.0 or softcap is not None:
        out = _dense(
            q,
            k,
            v,
            attention_mask,
            position_bias,
            offsets,
            causal,
            sliding_window,
            scale,
            dropout,
            softcap,
            s_aux,
        )
        return out, None
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    if attention_mask is not None:
        out = _padded(q, k, v, attention_mask, policy, causal, scale, s_aux)
    elif offsets is not None:
        out = attend_packed(q, k, v, *offsets, policy, scale, s_aux)
    elif causal:
        out = attend(q, k, v, policy, scale, s_aux)
    else:
        full = sink_flash_attention(q, k, v, causal=False, sinks=s_aux, softmax_scale=scale)
        out = cast(torch.Tensor, full)
    return out[..., :width], None


def _packed_offsets(
    q: torch.Tensor,
    k: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
) -> tuple[list[int], list[int]] | None:
    """Offsets of sequences packed into one row, or ``None`` where there is one per row."""
    if q.shape[0] != 1:
        return None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        return cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    masked = attention_mask is not None and attention_mask.dim() == 4
    if not masked or position_ids is None or q.shape[1] != k.shape[1]:
        return None
    if position_ids.dim() != 2 or position_ids.shape != q.shape[:2]:
        return None
    starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    steps = position_ids[0].diff()
    if len(starts) < 2 or starts[0] != 0 or int((steps != 1).sum()) != len(starts) - 1:
        return None
    edges = [*starts, q.shape[1]]
    return edges, edges


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    real: torch.Tensor,
    policy: SelectionPolicy,
    causal: bool,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention among the tokens that ``real [B, M]`` marks; padding queries give zeros."""
    batch, num_q = q.shape[:2]
    real_q = real[:, -num_q:]
    rows, keys = (x.flatten().nonzero()[:, 0] for x in (real_q, real))
    starts_q, starts_k = ([0, *x.sum(1).cumsum(0).tolist()] for x in (real_q, real))
    q, k, v = (
        x.flatten(0, 1).index_select(0, index)[None]
        for x, index in ((q, rows), (k, keys), (v, keys))
    )
    if causal:
        found = attend_packed(q, k, v, starts_q, starts_k, policy, scale, sinks)
    else:
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(x, dtype=torch.int32, device=q.device) for x in (starts_q, starts_k)
        )
        full = sink_flash_attention(
            q,
            k,
            v,
            causal=False,
            sinks=sinks,
            softmax_scale=scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        )
        found = cast(torch.Tensor, full)
    out = found.new_zeros(batch * num_q, *found.shape[2:])
    return out.index_copy(0, rows, found[0]).view(batch, num_q, *found.shape[2:])


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    offsets: tuple[list[int], list[int]] | None,
    causal: bool,
    sliding_window: int | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Exact attention in torch, ``[B, N, Hq, Dv]``, for what no kernel takes."""
    batch, num_q = q.shape[:2]
    num_k = k.shape[1]
    plain = attention_mask is None and position_bias is None
    if softcap is not None:
        if not plain or dropout > 0.0:
            raise NotImplementedError(
                "softcap: expected no padding, custom mask or dropout beside it; use "
                "attn_implementation='eager'"
            )
        starts_q, starts_k = offsets or (
            [i * num_q for i in range(batch + 1)],
            [i * num_k for i in range(batch + 1)],
        )
        packed = sdpa_fallback(
            *(x.flatten(0, 1) for x in (q, k, v)),
            reason="a logit soft cap in Transformers",
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            causal=causal,
            softmax_scale=scale,
            window_size=sliding_window,
            logits_soft_cap=softcap,
            sinks=sinks,
        )
        return packed.view(batch, num_q, *packed.shape[1:])
    count_fallback(
        "attention dropout in Transformers" if plain else "a custom mask in Transformers"
    )
    bias = _additive(q, k, attention_mask, position_bias, offsets, causal, sliding_window)
    group = q.shape[2] // k.shape[2]
    heads = [q.transpose(1, 2)]
    heads += [x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v)]
    dead = (bias == float("-inf")).all(dim=-1, keepdim=True)
    if sinks is not None:
        heads[1:] = [F.pad(x, (0, 0, 0, 1)) for x in heads[1:]]
        shape = (batch, q.shape[2], num_q)
        column = sinks.to(bias.dtype)[None, :, None, None].expand(*shape, 1)
        bias = torch.cat([bias.expand(*shape, num_k), column], dim=-1)
    with sdpa_kernel(_MASKED_SDPA):
        out = F.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], attn_mask=bias, dropout_p=dropout, scale=scale
        )
    return out.masked_fill(dead, 0.0).transpose(1, 2)


def _additive(
    q: torch.Tensor,
    k: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    offsets: tuple[list[int], list[int]] | None,
    causal: bool,
    sliding_window: int | None,
) -> torch.Tensor:
    """Everything that limits or biases the scores, broadcastable to ``[B, Hq, N, M]``."""
    num_q, num_k = q.shape[1], k.shape[1]
    bias = torch.zeros(1, 1, num_q, num_k, dtype=q.dtype, device=q.device)
    if attention_mask is not None and attention_mask.dim() == 4:
        if attention_mask.dtype == torch.bool:
            bias = bias.masked_fill(~attention_mask[..., :num_k], float("-inf"))
        else:
            bias = bias + attention_mask[..., :num_k].to(q.dtype)
    else:
        seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device)
        if causal:
            query = torch.arange(num_q, device=q.device)[:, None] + (num_k - num_q)
            key = torch.arange(num_k, device=q.device)
            seen = key <= query
            if sliding_window is not None:
                seen &= key > query - sliding_window
        if offsets is not None:
            same = torch.zeros_like(seen)
            for (q_lo, q_hi), (k_lo, k_hi) in zip(*map(pairwise, offsets), strict=True):
                same[q_lo:q_hi, k_lo:k_hi] = True
            seen = seen & same
        bias = bias.masked_fill(~seen, float("-inf"))
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask[:, None, None, :], float("-inf"))
    if position_bias is not None:
        bias = bias + position_bias.to(q.dtype)
    return bias

"""The attention function that Transformers calls for ``attn_implementation="sparsek"``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F

from sparsek_backend.transformers_op.dense import attend_dense
from sparsek_backend.transformers_op.keywords import as_autocast, check_keywords
from sparsek_backend.transformers_op.mask import LazyMask
from sparsek_backend.transformers_op.policy import selection_of
from sparsek_backend.transformers_op.sequences import attend, attend_packed, flash_attend
from sparsek_backend.transformers_op.topk import AttentionRule
from sparsek_backend.transformers_op.visibility import Packing, Visibility
from sparsek_kernels.checks import MAX_HEAD_DIM
from sparsek_kernels.fallback import count_fallback
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy


# Offsets and rules are read on the host, between compiled graphs.
@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend under the model's settings (:func:`configure`), or the layer's own window or chunks.

    A mask says which keys are seen, as it does for SDPA.  Without one, ``is_causal`` and
    ``sliding_window`` do.

    Native: causal and full attention with and without padding, packed texts (``cu_seq_lens_*``, or
    ``position_ids`` that start over), grouped heads, sliding windows, chunks, learned sinks.
    Everything else is served exactly and densely by torch: other masks, a window over a row with
    padding between its tokens, static caches, position biases, soft caps, dropout and head dims
    above 256; each reason is logged once and counted.

    Args:
        module: the layer; ``module.config``, ``module.layer_idx`` and ``module.is_causal`` count.
        query: ``[B, Hq, N, D]``.
        key: ``[B, Hkv, M, D]``.
        value: ``[B, Hkv, M, Dv]``.
        attention_mask: a mask, boolean or additive, broadcastable to ``[B, Hq, N, M]``, such as
            :func:`sparsek_mask` returns.
        scaling: factor of ``q . k``, ``D ** -0.5`` by default.
        sliding_window: keys that a query of this layer sees, its own included.
        s_aux: ``[Hq]`` learned sink logits.
        cu_seq_lens_q: offsets of packed texts in the flattened ``[B * N]`` queries, and
            ``cu_seq_lens_k`` in the keys; they hold beside a mask.

    Returns:
        ``[B, N, Hq, Dv]`` and ``None`` (no attention weights exist).

    Raises:
        NotImplementedError: a keyword that changes what is attended and is not served, a layer
            without a mask that does not say whether it is causal, packed texts with
            earlier keys beside a mask, or with a position bias.
        ValueError: a mask or offsets that do not fit queries and keys.
    """
    check_keywords(kwargs)
    q, k, v = as_autocast(*(x.transpose(1, 2) for x in (query, key, value)))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None and attention_mask is None:  # eager and SDPA attend differently then
        raise NotImplementedError(
            f"is_causal: expected {type(module).__name__} or its mask to say whether it is causal, "
            "got neither; set it on the layer"
        )
    mask = _checked_mask(q, k, attention_mask, bool(causal), sliding_window)
    packing = None
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        name = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        raise ValueError(
            f"{name}: expected offsets of packed texts beside the other ones, got None"
        )
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        mask, packing = _within_texts(q, k, mask, cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist())
    options: dict[str, Any] = {
        "dropout": dropout,
        "softcap": softcap,
        "position_bias": position_bias,
    }
    reason = _unserved(mask, max(q.shape[-1], v.shape[-1]), **options)
    if reason is not None:
        count_fallback(f"{reason} in Transformers")
        return _attend_dense_texts(q, k, v, mask, packing, scale, sinks=s_aux, **options), None
    mask = cast(LazyMask, mask)  # every other mask has a reason
    rule = mask.rule
    # Chunks bound what a query attends, as a window does: neither is made sparser.
    policy, indexers = StepPolicy.of(SelectionPolicy()), None
    if rule.causal and not rule.chunked:
        policy, indexers = selection_of(module, rule.window_size)
    served = AttentionRule(policy, scale, s_aux, indexers)
    width = v.shape[-1]
    if width != q.shape[-1]:  # a pad of nothing would copy
        q, k, v = (F.pad(x, (0, max(q.shape[-1], width) - x.shape[-1])) for x in (q, k, v))
    packing = packing or mask.packing
    if packing is not None:
        out = _attend_texts(q, k, v, packing, rule.causal, served)
    elif rule.causal:
        out = attend(q, k, v, served)
    else:
        out = flash_attend(q, k, v, served, causal=False)
    return out[..., :width].contiguous(), None


def _checked_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    attention_mask: torch.Tensor | None,
    causal: bool,
    sliding_window: int | None,
) -> torch.Tensor:
    """The mask of ``[B, N, Hq, D]`` queries and ``[B, M, Hkv, D]`` keys, as a rule if it is one."""
    (batch, num_q, heads), num_k = q.shape[:3], k.shape[1]
    if attention_mask is None:
        window = sliding_window
        if window is not None and not causal:
            window -= 1  # on each side, without the query's own key
        rule = Visibility(causal=causal, window_size=window)
        return LazyMask(rule, (batch, num_q, num_k), q.device)
    if isinstance(attention_mask, LazyMask) and attention_mask.holds:
        if attention_mask.shape == (batch, 1, num_q, num_k):
            return attention_mask
        if attention_mask.rule.sees_all:  # the only rule that fits keys of any number
            return LazyMask(attention_mask.rule, (batch, num_q, num_k), q.device)
        attention_mask = attention_mask.seen()
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.written
    mask = attention_mask[..., :num_k]  # longer in some models, for keys to come
    wanted = batch, heads, num_q, num_k
    sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
    if mask.dim() > 4 or any(size not in (1, want) for size, want in sizes):
        raise ValueError(
            f"attention_mask: expected a shape that broadcasts to {list(wanted)}, "
            f"got {list(attention_mask.shape)}"
        )
    return mask


def _within_texts(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, starts_q: list[int], starts_k: list[int]
) -> tuple[torch.Tensor, Packing | None]:
    """The mask within packed texts: with the texts' offsets apart, or the offsets in the mask."""
    for name, starts, x in (("q", starts_q, q), ("k", starts_k, k)):
        total = x.shape[0] * x.shape[1]
        ends = starts[:1] == [0] and starts[-1] == total
        if len(starts) != len(starts_q) or not ends or starts != sorted(starts):
            raise ValueError(
                f"cu_seq_lens_{name}: expected {len(starts_q)} offsets from 0 to the token count "
                f"{total}, got {starts}"
            )
    if isinstance(mask, LazyMask) and mask.rule.groups is None and mask.rule.real is None:
        return mask, Packing(None, None, starts_q, starts_k)
    if starts_q != starts_k:
        raise NotImplementedError(
            "cu_seq_lens_k: expected cu_seq_lens_q beside padding or a mask, got other offsets; "
            "put the texts in rows of their own, or state them in the mask alone"
        )
    edges = torch.zeros(q.shape[0] * q.shape[1], dtype=torch.long)
    edges[[start for start in starts_q if start < len(edges)]] = 1
    texts = edges.cumsum(0).view(q.shape[:2]).to(q.device)
    if isinstance(mask, LazyMask):
        rule, shape = mask.rule.with_texts(texts), (*q.shape[:2], k.shape[1])
        return LazyMask(rule, shape, mask.device), None
    same = (texts[:, :, None] == texts[:, None])[:, None]
    if mask.dtype == torch.bool:
        return mask & same, None
    return mask.masked_fill(~same, float("-inf")), None


def _unserved(
    mask: torch.Tensor,
    head_dim: int,
    dropout: float,
    softcap: float | None,
    position_bias: torch.Tensor | None,
) -> str | None:
    """Why no kernel attends under a mask and these options, or ``None`` where one does."""
    if softcap is not None:
        return "a logit soft cap"
    if dropout > 0.0:
        return "attention dropout"
    if position_bias is not None:
        return "a position bias"
    if head_dim > MAX_HEAD_DIM:
        return f"a head dim above {MAX_HEAD_DIM}"
    if not isinstance(mask, LazyMask):
        return "a custom mask"
    if mask.rule.window_size is not None and not mask.rule.causal:
        return "a window on both sides"
    # Kernels see tokens without the padding between them, and would look back farther.
    if mask.rule.window_size is not None and mask.has_holes:
        return "a window over padding between tokens"
    return None


def _attend_dense_texts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    packing: Packing | None,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    """:func:`attend_dense`, text by text where offsets are given."""
    if packing is None:
        mask = mask.seen() if isinstance(mask, LazyMask) else mask
        return attend_dense(q, k, v, mask, scale, **options)
    rule, outs = cast(LazyMask, mask).rule, []
    if options["position_bias"] is not None:
        raise NotImplementedError(
            "cu_seq_lens_q: a position bias is not supported beside packed texts; put them in "
            "rows of their own"
        )
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    edges = zip(pairwise(packing.starts_q), pairwise(packing.starts_k), strict=True)
    for (q_lo, q_hi), (k_lo, k_hi) in edges:
        text = flat_q[None, q_lo:q_hi], flat_k[None, k_lo:k_hi], flat_v[None, k_lo:k_hi]
        seen = rule.mask(1, q_hi - q_lo, k_hi - k_lo, q.device)
        outs.append(attend_dense(*text, seen, scale, **options))
    return torch.cat(outs, dim=1).view(*q.shape[:2], *outs[0].shape[2:])


def _attend_texts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    causal: bool,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention ``[B, N, Hq, D]`` within the texts of a packing; zeros for queries left out."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if packing.rows is not None:
        q = q.index_select(0, packing.rows)
    if packing.keys is not None:
        k, v = (x.index_select(0, packing.keys) for x in (k, v))
    q, k, v = (x[None] for x in (q, k, v))
    starts = packing.starts_q, packing.starts_k
    if len(packing.starts_q) == 1:
        found = q
    elif causal:
        found = attend_packed(q, k, v, *starts, rule)
    else:
        found = flash_attend(q, k, v, rule, starts, causal=False)
    if packing.rows is None:
        return found.view(shape)
    out = found.new_zeros(shape[0] * shape[1], *shape[2:])
    return out.index_copy(0, packing.rows, found[0]).view(shape)

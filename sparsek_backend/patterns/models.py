"""Patterns of a Transformers model: learned while it runs, and executed by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.learned import Heads, ImportanceOptions, LearnedPattern
from sparsek_backend.patterns.training.pruning import Pruning
from sparsek_backend.transformers_op.keywords import as_autocast, check_keywords
from sparsek_backend.transformers_op.layers import attention_layers
from sparsek_backend.transformers_op.mask import LazyMask, sparsek_mask
from sparsek_backend.transformers_op.policy import text_config
from sparsek_backend.transformers_op.visibility import Visibility
from sparsek_kernels import block_sparse_attention

# Transformers is there: the import above says so, or how to install it.
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # isort: skip
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # isort: skip
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel  # isort: skip

_NAME = "sparsek_patterns"
_UNSERVED = {
    "softcap": "a logit soft cap",
    "s_aux": "learned sinks",
    "position_bias": "a position bias",
    "cu_seq_lens_q": "packed texts",
}
"""Arguments that Transformers passes only to layers that are not plain causal attention."""
_SERVED = {"cu_seq_lens_k", "dropout", "is_causal", "sliding_window", *_UNSERVED}
"""Arguments that are read here."""


Observe = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Gets ``q [B, N, Hq, D]``, ``k`` and ``v [B, N, Hkv, D]`` of a layer, and the softmax scale."""


class _Observed(NamedTuple):
    """Who sees every layer's batches; each layer attends everything."""

    observers: Mapping[int, Observe]


Patterns = Mapping[int, BlockSparsePattern | LearnedPattern]

_active: WeakKeyDictionary[torch.nn.Module, _Observed | Patterns] = WeakKeyDictionary()
"""By attention layer, so that a backward pass on another thread, which computes again, finds it."""


def learn_model_patterns(
    model: Any,
    batches: Iterable[torch.Tensor],
    *,
    block_size: int,
    sparsity: float,
    heads: Heads = "kv",
    importance: ImportanceOptions | None = None,
    pruning: Pruning | None = None,
    name: str = "",
) -> ModelPatterns:
    """Learn a pattern for every layer of a causal Transformers model, from what it attends.

    Args:
        model: a Transformers model whose layers call its attention functions.
        batches: token ids ``[B, N]`` without padding, all of the same length.
        block_size: tokens along a side of a block.
        sparsity: share of the visible blocks to leave out, from 0 to below 1.
        heads: who shares a pattern; see :class:`LearnedPattern`.
        importance: how blocks are weighed; by the mean over all batches when ``None``.
        pruning: which blocks stay; sinks, a window and the heaviest when ``None``.
        name: the model's, in a file.

    Returns:
        Patterns on the CPU, with the importance of their blocks as weights.

    Raises:
        ModuleNotFoundError: Transformers is missing; the message has the install command.
        NotImplementedError: a layer that is not plain causal attention over whole sequences: a
            window, chunks, a mask, a soft cap, learned sinks; the message names it.
        ValueError: no batches, lengths that differ, or an argument out of range.
    """
    watched = watch_model(model, list(batches), block_size, heads, importance)
    masses = [x.importance() for x in watched.values()]
    visible = [x.visible for x in watched.values()]
    masks = (pruning or Pruning()).masks(masses, visible, sparsity)
    patterns = {
        layer: BlockSparsePattern.from_mask(mask, block_size, mass=mass).to("cpu")
        for layer, mask, mass in zip(watched, masks, masses, strict=True)
    }
    return ModelPatterns(patterns, name, sparsity)


def watch_model(
    model: Any,
    batches: Sequence[torch.Tensor],
    block_size: int,
    heads: Heads,
    importance: ImportanceOptions | None = None,
) -> dict[int, LearnedPattern]:
    """Dense patterns that watched the layers of a model on all batches, by layer index."""
    options = importance or ImportanceOptions(reduction="mean", window=max(len(batches), 1))
    tokens = length_of(batches)
    watched = learned_patterns(model, tokens, block_size, heads=heads, importance=options)
    observe_model(model, {layer: x.observe for layer, x in watched.items()}, batches)
    return watched


def length_of(batches: Sequence[torch.Tensor]) -> int:
    """Tokens of the texts of all batches."""
    for ids in batches:
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"batches: expected token ids [B, N], got shape {list(ids.shape)}")
    lengths = sorted({ids.shape[1] for ids in batches})
    if len(lengths) != 1:
        raise ValueError(f"batches: expected texts of one length, got lengths {lengths}")
    return lengths[0]


def learned_patterns(
    model: Any,
    num_tokens: int,
    block_size: int,
    *,
    heads: Heads = "kv",
    importance: ImportanceOptions | None = None,
    gates: bool = False,
) -> dict[int, LearnedPattern]:
    """A pattern for every layer of a causal Transformers model, to be learned while it trains.

    Args:
        model: a Transformers model whose layers call its attention functions.
        num_tokens: tokens of the longest text.
        block_size: tokens along a side of a block.
        heads: who shares a pattern; see :class:`LearnedPattern` for this, ``importance`` and
            ``gates``.

    Returns:
        By layer index, on the model's device; train inside ``attend_patterns(model, patterns)``.

    Raises:
        NotImplementedError: the model has no layer that calls Transformers' attention functions.
    """
    layers, config = layers_by_index(model), model.config.get_text_config()
    num_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return {
        layer: LearnedPattern(
            num_heads, kv_heads, num_tokens, block_size,
            heads=heads, importance=importance, gates=gates,
        ).to(model.device)
        for layer in layers
    }  # fmt: skip


def layers_by_index(model: Any) -> dict[int, list[torch.nn.Module]]:
    """The layers of a model's text part that call an attention function, in ascending order.

    Raises:
        NotImplementedError: there are none, so that nothing would attend a pattern.
    """
    found: dict[int, list[torch.nn.Module]] = {}
    for layer in attention_layers(model, text_config(model.config)).values():
        index = getattr(layer, "layer_idx", None)
        if isinstance(index, int) and index >= 0:  # below: layers share it
            found.setdefault(index, []).append(layer)
    if not found:
        raise NotImplementedError(
            f"model: {type(model).__name__} has no numbered layer that calls an attention function "
            "of Transformers, so patterns have no effect on it"
        )
    return dict(sorted(found.items()))


def observe_model(
    model: Any, observers: Mapping[int, Observe], batches: Iterable[torch.Tensor]
) -> None:
    """Run a model, attending everything, and show each layer's batches to its observer.

    Args:
        observers: by layer index, for every layer.
        batches: token ids ``[B, N]`` without padding, N the tokens that the observers are for.
    """
    with _attending(model, _Observed(observers)), torch.no_grad():
        for ids in batches:
            model.base_model(ids.to(model.device), use_cache=False)  # without its head's logits


@contextmanager
def attend_patterns(model: Any, patterns: Patterns) -> Iterator[None]:
    """Within the block, the model's layers attend their patterns alone; differentiable.

    With gradient checkpointing the backward pass, which computes again, belongs inside too.

    Args:
        model: a Transformers model whose layers call its attention functions; run it on whole
            sequences without padding (``use_cache=False``).
        patterns: by layer index, on the model's device; layers without one attend everything.
            A :class:`LearnedPattern` watches while its layer is in training mode.

    Raises:
        NotImplementedError: a layer that is not plain causal attention over whole sequences (as
            above), or attention dropout; no layer that calls Transformers' attention functions.
        ValueError: patterns of layers that the model lacks, or, where it runs, a pattern that does
            not fit the sequence or the heads.
    """
    layers = layers_by_index(model)
    others = [layer for layer in patterns if layer not in layers]
    if others:
        raise ValueError(f"patterns: expected indices of the model's layers, got {others}")
    with _attending(model, patterns):
        yield


@contextmanager
def _attending(model: Any, active: _Observed | Patterns) -> Iterator[None]:
    config = text_config(model.config)
    parts = (m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config)
    part, before = next(parts, model), config._attn_implementation
    layers = [layer for found in layers_by_index(model).values() for layer in found]
    outer = {layer: _active[layer] for layer in layers if layer in _active}
    _active.update(dict.fromkeys(layers, active))
    part.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        part.set_attn_implementation(before)
        for layer in layers:
            del _active[layer]
        _active.update(outer)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: query ``[B, Hq, N, D]``, key and value ``[B, Hkv, N, D]``."""
    active, layer = _active[module], int(module.layer_idx)  # type: ignore[arg-type]
    executed = not isinstance(active, _Observed) and layer in active
    causal = kwargs.get("is_causal")
    rule = Visibility(causal=getattr(module, "is_causal", True) if causal is None else causal)
    if isinstance(attention_mask, LazyMask):
        rule = attention_mask.rule
    window = rule.window_size is not None or kwargs.get("sliding_window") is not None
    reasons = {
        "a mask": attention_mask is not None and not isinstance(attention_mask, LazyMask),
        "padding": rule.real is not None,
        "chunks": rule.chunked,
        "packed texts": rule.groups is not None and not rule.chunked,
        "a sliding window": window,
        "cached keys": query.shape[2] != key.shape[2],
        "attention without causality": not rule.causal,
        "attention dropout": executed and bool(kwargs.get("dropout")),
    }
    for name, words in _UNSERVED.items():
        reasons[words] = reasons.get(words, False) or kwargs.get(name) is not None
    found = [words for words, holds in reasons.items() if holds]
    if found:
        raise NotImplementedError(
            f"model: patterns are for plain causal layers, got {' and '.join(found)} in layer "
            f"{layer}; record q, k and v for learn_pattern, and call block_sparse_attention, in "
            "the model's own code"
        )
    check_keywords({name: x for name, x in kwargs.items() if name not in _SERVED})
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = as_autocast(*(x.transpose(1, 2) for x in (query, key, value)))
    width = v.shape[-1]
    if width != q.shape[-1]:  # a pad of nothing would copy
        widest = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    chosen = None
    if isinstance(active, _Observed):
        active.observers[layer](q, k, v, scaling)
    else:
        chosen = active.get(layer)
    if isinstance(chosen, LearnedPattern):
        return chosen.train(module.training)(q, k, v, scaling)[..., :width], None
    if chosen is not None:
        out = block_sparse_attention(q, k, v, chosen, causal=True, softmax_scale=scaling)
        return cast(torch.Tensor, out)[..., :width], None
    dense: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, None, scaling=scaling, **kwargs | {"is_causal": True}
    )
    return dense


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sparsek_mask)

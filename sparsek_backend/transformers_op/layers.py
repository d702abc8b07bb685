"""Which layers of a Transformers model heed SparseK's settings, and why others do not."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from transformers.modeling_utils import PreTrainedModel

from sparsek_backend.transformers_op.keywords import OWN_RULES
from sparsek_kernels.checks import MAX_HEAD_DIM

NAME = "sparsek"
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_CLASSES = "ATTENTION_CLASSES"
"""How the names of Transformers' older tables end, of a class for each implementation."""


def refuse_class(model_class: Any) -> None:
    """Refuse a model whose layers would not call SparseK, or let the layer that would not do so.

    Raises:
        NotImplementedError: the model's module has attention layers of its own, none of which
            calls Transformers' attention functions.
    """
    names = vars(sys.modules[model_class.__module__])
    if _TABLE not in names and not model_class._can_set_attn_implementation():
        raise NotImplementedError(
            f"{model_class.__name__}: its layers call no attention function of Transformers, so "
            "attn_implementation='sparsek' would do nothing; load it with 'eager' or 'sdpa', or a "
            "larger model's text part alone with attn_implementation={'text_config': 'sparsek'}"
        )
    for name, classes in list(names.items()):
        if name.endswith(_CLASSES) and isinstance(classes, dict):
            classes.setdefault(NAME, _refuse_layer(name))


def _refuse_layer(table: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{table}: layers of this model are of a class for each implementation, and call no "
            "attention function of Transformers; load it with 'eager' or 'sdpa' in place of "
            "'sparsek'"
        )

    return refuse


def attention_layers(model: torch.nn.Module, config: Any) -> dict[str, torch.nn.Module]:
    """The layers by name that call an attention function and have this kind of configuration."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if not isinstance(layer, PreTrainedModel)  # which manages the functions
        and type(getattr(layer, "config", None)) is type(config)
        and _keywords(layer)
    }


def ignored_because(layer: torch.nn.Module, config: Any, generates: bool) -> str | None:
    """Why a layer attends by no settings of SparseK, or ``None`` where it heeds them.

    Args:
        generates: whether a layer that does not say so is causal.
    """
    keywords, softcap = _keywords(layer), getattr(layer, "attn_logit_softcapping", None)
    rules, head_dim = sorted(keywords & OWN_RULES.keys()), getattr(layer, "head_dim", None)
    if layer.config is not config:
        return "a configuration of their own"
    if rules and getattr(layer, "indexer", layer) is not None:
        return f"{rules[0]} of their own"
    if hasattr(layer, "prepare_dynamic_mask"):  # Doge
        return "a mask of their own"
    if not getattr(layer, "is_causal", generates):
        return "no causality"
    if softcap is not None:
        return "a logit soft cap"
    if "position_bias" in keywords:
        return "a position bias"
    if isinstance(head_dim, int) and head_dim > MAX_HEAD_DIM:
        return f"a head dim above {MAX_HEAD_DIM}"
    return _own_bounds(layer, config)


def _own_bounds(layer: torch.nn.Module, config: Any) -> str | None:
    """What the model's configuration lets a layer attend, in words, if that is not everything."""
    types, index = getattr(config, "layer_types", None) or (), getattr(layer, "layer_idx", None)
    if isinstance(index, int) and 0 <= index < len(types):
        words = {
            "sliding": "a sliding window",
            "chunked": "chunks",
            "compressed": "compressed keys",
        }
        return next((words[kind] for kind in words if kind in types[index]), None)
    window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
    return None if window is None else "a sliding window"


def _keywords(layer: torch.nn.Module) -> frozenset[str]:
    return _strings(cast(Any, type(layer)))


@cache
def _strings(layer_class: Any) -> frozenset[str]:
    """The strings, names of keywords among them, in methods that call an attention function."""
    found: set[str] = set()
    for name in dir(layer_class):
        method = inspect.getattr_static(layer_class, name)
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if code is not None and _TABLE in code.co_names:
            found.add(_TABLE)
            for constant in code.co_consts:
                parts = constant if isinstance(constant, tuple) else (constant,)
                found.update(part for part in parts if isinstance(part, str))
    return frozenset(found)

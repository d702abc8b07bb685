"""What a Transformers model attends: its settings, and the selection policy of each layer."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from sparsek_backend.config import ConfigError, ResolvedConfig, SparsityConfig, resolve_config
from sparsek_backend.config_effects import check_dense_layers, describe_idle_settings
from sparsek_backend.transformers_op.layers import NAME, attention_layers, ignored_because
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

logger = logging.getLogger(__name__)

_FIELD = "sparsek"
_SERVED_BY_VLLM = (
    ("mode", "pattern"),
    ("mode", "seer"),
    ("sparse_phase", "prefill"),
    ("time_selection", True),
)
"""Values of settings that nothing here would heed."""

Selection: TypeAlias = tuple[StepPolicy, Indexers | None]
"""What a layer attends, and what chooses its blocks; ``None``: the default indexers choose."""

_selections: WeakKeyDictionary[torch.nn.Module, tuple[object, Selection]] = WeakKeyDictionary()


def configure(model: torch.nn.Module, **settings: Any) -> SparsityConfig:
    """Choose what a model attends with ``attn_implementation="sparsek"``.

    The settings are stored as ``model.config.sparsek``, so ``save_pretrained`` keeps them.  Fields
    that are not given come from ``SPARSEK_*`` variables, the model's own sparse configuration and
    the defaults, as they do for vLLM.

    Args:
        model: a Transformers model.
        settings: fields of :class:`sparsek_backend.config.SparsityConfig`; without any, the stored
            settings are cleared.  Layers that do not heed them are logged, and settings that
            others leave without effect.

    Returns:
        The merged settings.

    Raises:
        ConfigError: unknown field, invalid value, layers that the model lacks, or settings that
            contradict each other.
        NotImplementedError: no layer would heed the settings; the message says why.
        TypeError: ``model`` has no Transformers configuration.
        ValueError: the model has another ``attn_implementation``.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise TypeError(f"model: expected a Transformers model, got {type(model).__name__}")
    resolved = _resolve(settings, text_config(config))
    if settings:
        _check_heeded(model, resolved.config)
        check_dense_layers(resolved, config.get_text_config(decoder=True).num_hidden_layers)
    for line in describe_idle_settings(resolved):
        logger.warning(line)
    setattr(text_config(config), _FIELD, dict(settings))
    for layer in model.modules():  # variables count that were set since
        _selections.pop(layer, None)
    return resolved.config


def layers_of(model: torch.nn.Module) -> dict[str, str | None]:
    """Every attention layer of a model's decoder by name, with the reason why it ignores settings.

    Raises:
        NotImplementedError: the model has no layer that calls Transformers' attention functions.
        ValueError: the model has another ``attn_implementation``.
    """
    config = text_config(model.config)
    layers = attention_layers(model, config)
    if not layers:
        raise NotImplementedError(
            f"model: {type(model).__name__} has no layer with a {type(config).__name__} that calls "
            "an attention function of Transformers, so SparseK has no effect on it"
        )
    if config._attn_implementation != NAME:
        raise ValueError(
            f"model: expected attn_implementation 'sparsek', got {config._attn_implementation!r}; "
            "load the model with it, or call model.set_attn_implementation('sparsek') first"
        )
    generates = getattr(model, "can_generate", bool)()
    return {name: ignored_because(layer, config, generates) for name, layer in layers.items()}


def _check_heeded(model: torch.nn.Module, settings: SparsityConfig) -> None:
    layers = layers_of(model)
    ignored = Counter(reason for reason in layers.values() if reason is not None)
    if not ignored or settings.mode == "dense":  # which is how other layers attend
        return
    reasons = ", ".join(f"{reason} ({count})" for reason, count in ignored.items())
    if ignored.total() == len(layers):
        raise NotImplementedError(
            f"model: no attention layer of {type(model).__name__} would heed the settings, because "
            f"they have {reasons}; leave them out, or use mode 'dense'"
        )
    logger.warning(
        "SPARSEK: %d of %d attention layers of %s do not heed the settings; they have %s",
        ignored.total(), len(layers), type(model).__name__, reasons,
    )  # fmt: skip


def text_config(config: Any) -> Any:
    """The configuration that the decoder layers of a (multi-modal) model see."""
    found = config.get_text_config(decoder=True)
    return config if type(found) is type(config) else found  # a copy, of an encoder and decoder


def _resolve(settings: Mapping[str, Any] | None, config: Any) -> ResolvedConfig:
    own = getattr(config, "sparse_config", None)
    resolved = resolve_config(settings or None, os.environ, own, source="configure()")
    for name, value in _SERVED_BY_VLLM:
        if getattr(resolved.config, name) == value:
            raise ConfigError(
                f"SPARSEK setting {name} (from {resolved.sources[name]}): {value!r} is served in "
                f"vLLM alone, not in Transformers; remedy: remove {name}"
            )
    if resolved.scores_without_positions:
        raise ConfigError(
            f"SPARSEK setting mode (from {resolved.sources['mode']}): 'infllm' with use_nope needs "
            "queries and keys without positions, which Transformers does not hand over; remedy: "
            "mode block_topk, or serve in vLLM"
        )
    return resolved


def settings_of(config: Any) -> SparsityConfig:
    """Merge the settings stored in a model's configuration with the other sources."""
    return _resolve(getattr(config, _FIELD, None), config).config


def selection_of(module: torch.nn.Module, sliding_window: int | None) -> Selection:
    """Return what one attention layer attends: its model's own window, or SparseK's settings.

    Settings are resolved once per layer, and again after :func:`configure` or when the stored ones
    change.
    """
    if sliding_window is not None:
        return StepPolicy.of(SelectionPolicy(window_size=sliding_window)), None
    stored = getattr(module.config, _FIELD, None)
    known = _selections.get(module)
    if known is None or known[0] != stored:
        index, settings = getattr(module, "layer_idx", None) or 0, settings_of(module.config)
        policy = settings.policy_for(max(index, 0))  # -1: shared by layers
        indexers = Indexers(InfLLM(), InfLLM()) if settings.mode == "infllm" else None
        known = (None if stored is None else dict(stored), (policy, indexers))
        _selections[module] = known
    return known[1]

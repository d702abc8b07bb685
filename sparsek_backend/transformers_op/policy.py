"""What a Transformers model attends: its settings, and the selection policy of each layer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from sparsek_backend.config import ConfigError, SparsityConfig, resolve_config
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

_FIELD = "sparsek"
_SERVED_BY_VLLM = (("mode", "pattern"), ("mode", "seer"), ("sparse_phase", "prefill"))
"""Values of settings that nothing here would heed."""

Selection: TypeAlias = tuple[StepPolicy, Indexers | None]
"""What a layer attends, and what chooses its blocks: ``None`` for those of ordinary models."""

_selections: WeakKeyDictionary[torch.nn.Module, tuple[object, Selection]] = WeakKeyDictionary()


def configure(model: torch.nn.Module, **settings: Any) -> SparsityConfig:
    """Choose what a model attends with ``attn_implementation="sparsek"``.

    The settings are stored as ``model.config.sparsek``, so ``save_pretrained`` keeps them.  Fields
    that are not given come from ``SPARSEK_*`` variables, the model's own sparse configuration and
    the defaults, as they do for vLLM.

    Args:
        model: a Transformers model.
        settings: fields of :class:`sparsek_backend.config.SparsityConfig`; without any, the stored
            settings are cleared.

    Returns:
        The merged settings.

    Raises:
        ConfigError: unknown field, invalid value, or settings that contradict each other.
        TypeError: ``model`` has no Transformers configuration.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise TypeError(f"model: expected a Transformers model, got {type(model).__name__}")
    resolved = _resolve(settings, config)
    setattr(_text_config(config), _FIELD, dict(settings))
    return resolved


def _text_config(config: Any) -> Any:
    """The configuration that the decoder layers of a (multi-modal) model see."""
    return config.get_text_config(decoder=True)


def _resolve(settings: Mapping[str, Any] | None, config: Any) -> SparsityConfig:
    own = getattr(config, "sparse_config", None)
    resolved = resolve_config(settings or None, os.environ, own)
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
    return resolved.config


def settings_of(config: Any) -> SparsityConfig:
    """Merge the settings stored in a model's configuration with the other sources."""
    return _resolve(getattr(config, _FIELD, None), config)


def selection_of(module: torch.nn.Module, sliding_window: int | None) -> Selection:
    """Return what one attention layer attends: its model's own window, or SparseK's settings.

    Settings are resolved once per layer, and again when the stored ones change.
    """
    if sliding_window is not None:
        return StepPolicy.of(SelectionPolicy(window_size=sliding_window)), None
    stored = getattr(module.config, _FIELD, None)
    known = _selections.get(module)
    if known is None or known[0] != stored:
        index, settings = getattr(module, "layer_idx", None), settings_of(module.config)
        policy = settings.policy_for(0 if index is None else index)
        indexers = Indexers(InfLLM(), InfLLM()) if settings.mode == "infllm" else None
        known = (None if stored is None else dict(stored), (policy, indexers))
        _selections[module] = known
    return known[1]

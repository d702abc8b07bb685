"""The state that the layers of one engine share in this process."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config

from sparsek_backend.config import ResolvedConfig

from . import compat
from .gates import GateFile, open_gates
from .names import BACKEND_NAME
from .settings import engine_config, prefill_pattern
from .sleep import make_to_stay

if TYPE_CHECKING:
    from sparsek_backend.patterns.prefill import PrefillPattern


@dataclass
class Engine:
    """One engine."""

    resolved: ResolvedConfig  # its settings.  Model-derived settings come from the target model.
    dtype: torch.dtype  # of the target model
    labels: Mapping[str, str]  # of its metrics, equal to those of vLLM's own metrics
    # the blocks that prefills attend in mode ``pattern``, else ``None``
    pattern: PrefillPattern | None = None
    gates: GateFile | None = None  # of mode ``seer``, else ``None``
    # rope cos and sin (:attr:`PagedBatch.rotation`), where blocks are scored without positions
    rotation: torch.Tensor | None = None
    selects_blocks: bool = False  # whether any layer selects blocks by score
    # whether windows have pages of the same size, as without vLLM's hybrid KV manager
    equal_pages: bool = False
    # whether layers have run what takes most memory, for vLLM to measure it
    dummy_run_done: bool = False
    # kinds of layers whose kernels have been compiled
    ready_kernels: set[Hashable] = field(default_factory=set)
    # of the requests of the step that vLLM prepares, in their order; ``None`` where it does not say
    prompt_lengths: Any = None
    # names of layers whose steps are built together, the latest group at the end; vLLM may add to
    # one until its first step
    groups: list[list[str]] = field(default_factory=list)

    def rotation_on(self, device: torch.device) -> torch.Tensor | None:
        """Return :attr:`rotation` on the device of the layers, where it stays."""
        if self.rotation is not None and self.rotation.device != device:
            self.rotation = make_to_stay(partial(self.rotation.to, device))
        return self.rotation


_engines: list[tuple[weakref.ref[Any], Engine]] = []
_latest: Engine | None = None


def engine_of(vllm_config: Any) -> Engine:
    """Return the engine with this configuration; its settings are read once.

    A draft model has a changed copy of its engine's configuration.  Both copies share the
    compilation's part, which knows all layers.
    """
    _engines[:] = [entry for entry in _engines if entry[0]() is not None]
    known = _known_engine(vllm_config)
    if known is not None:
        return known
    model = vllm_config.model_config
    resolved = engine_config(vllm_config)
    engine = Engine(
        resolved,
        model.dtype,
        compat.metric_labels(vllm_config),
        prefill_pattern(resolved),
        open_gates(resolved, model),
        equal_pages=bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
    )
    _engines.append((weakref.ref(vllm_config.compilation_config), engine))
    return engine


def _known_engine(vllm_config: Any) -> Engine | None:
    found = (engine for known, engine in _engines if known() is vllm_config.compilation_config)
    return next(found, None)


def _keep_prompt_lengths(vllm_config: Any, lengths: Any) -> None:
    engine = _known_engine(vllm_config)
    if engine is not None:
        engine.prompt_lengths = lengths


def current_engine() -> Engine:
    """Return the engine whose layers are being built."""
    global _latest
    compat.hook_kv_cache_spec(BACKEND_NAME, lambda: _latest is not None and _latest.selects_blocks)
    compat.hook_prompt_lengths(_keep_prompt_lengths)
    config = get_current_vllm_config()
    _latest = engine_of(config)
    if _latest.rotation is None and _latest.resolved.scores_without_positions:
        _latest.rotation = compat.rotation_of(config.model_config)
    return _latest


def engine_in_use() -> Engine | None:
    """Return the engine of vLLM's current configuration, where that is set and has layers."""
    config = compat.current_config()
    return None if config is None else _known_engine(config)


def latest_engine() -> Engine | None:
    """Return the engine whose layers were built last.

    vLLM asks a backend for the sizes of pages without saying whose they are.
    """
    return _latest

"""Settings become what a layer attends: policies of both phases, and what chooses the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from sparsek_backend.config import register_mode
from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.engine import Engine
from sparsek_backend.vllm_backend.sleep import make_to_stay
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.index.seer import Seer
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash, block_lists
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy


@dataclass(frozen=True)
class LayerSite:
    """Where a layer is."""

    index: int  # its position in the model
    num_kv_heads: int  # KV heads that this rank has of it
    owns_pages: bool  # whether it writes the pages that it reads
    device: torch.device  # where it runs

    def own_heads(self, total: int) -> slice:
        """Which of a layer's ``total`` KV heads this rank has; ranks beyond them share one."""
        rank, ranks = compat.tensor_rank()
        first = rank * total // ranks
        return slice(first, first + self.num_kv_heads)


@dataclass(frozen=True, eq=False)
class LayerSelection:
    """What a layer attends."""

    policy: StepPolicy  # of both phases
    indexers: Indexers  # what chooses the blocks of each phase that selects


Builder: TypeAlias = Callable[[StepPolicy, Engine, LayerSite], Indexers]
"""Makes the indexers of a layer that selects blocks."""


def _by_pattern(policy: StepPolicy, engine: Engine, site: LayerSite) -> Indexers:
    entries = engine.pattern.entries.get(site.index) if engine.pattern else None
    if entries is None or not policy.prefill.selects_blocks:
        return default_indexers(policy)
    lists = block_lists(entries[site.own_heads(len(entries))], policy.prefill)
    lists = make_to_stay(partial(lists.to, site.device))
    return Indexers(VerticalSlash(lists), default_indexers(policy).decode)


def _by_gates(policy: StepPolicy, engine: Engine, site: LayerSite) -> Indexers:
    file = engine.gates
    if file is None:
        raise ValueError("engine: expected the gates of mode seer, got None")
    gates = file.layer(site.index, site.own_heads(file.num_kv_heads), site.owns_pages, site.device)
    return Indexers(None, Seer(gates))


BUILDERS: dict[str, Builder] = {
    "block_topk": lambda policy, engine, site: default_indexers(policy),
    "pattern": _by_pattern,
    "infllm": lambda policy, engine, site: Indexers(InfLLM(), InfLLM()),
    "seer": _by_gates,
}


def register_indexer(mode: str, build: Builder) -> None:
    """Let the setting ``mode`` choose another way to select blocks.

    Call it in every process, before the engine starts: from a plugin of ``vllm.general_plugins``.

    Args:
        mode: the name; the settings of ``block_topk`` go with it.
        build: makes the indexers of a layer.
    """
    register_mode(mode)
    BUILDERS[mode] = build


def select_by_settings(engine: Engine, site: LayerSite) -> LayerSelection:
    """Return what the settings let a layer with full attention attend."""
    config = engine.resolved.config
    policy = config.policy_for(site.index)
    if not policy.selects_blocks:
        return LayerSelection(policy, Indexers())
    return LayerSelection(policy, BUILDERS[config.mode](policy, engine, site))


def select_by_model(window_size: int | None) -> LayerSelection:
    """Return what the model itself lets a layer attend: everything, or its own window."""
    policy = SelectionPolicy(window_size=window_size)
    return LayerSelection(StepPolicy(policy, policy), Indexers())

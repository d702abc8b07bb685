"""Learning the patterns of a model from texts.

Batches are token ids ``[B, N]`` without padding, all of one length; the model attends everything
meanwhile.  ``importance`` says how blocks are weighed (the mean over all batches by default),
``name`` is the model's in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.models import layers_by_index, length_of, observe_model, watch_model
from sparsek_backend.patterns.prefill import PrefillPattern, ranked_entries
from sparsek_backend.patterns.training.heads import WindowErrors, fit_windows, window_sizes
from sparsek_backend.patterns.training.learned import ImportanceOptions


def learn_prefill_pattern(
    model: Any,
    batches: Iterable[torch.Tensor],
    *,
    block_size: int = 64,
    sinks: int = 1,
    window: int = 1,
    importance: ImportanceOptions | None = None,
    name: str = "",
) -> PrefillPattern:
    """What vLLM's mode ``pattern`` follows; the server attends sinks and window anyway."""
    learned = watch_model(model, list(batches), block_size, "kv", importance)
    entries = {
        layer: ranked_entries(watched.importance(), sinks=sinks, window=window)
        for layer, watched in learned.items()
    }
    return PrefillPattern(entries, block_size, name)


def learn_window_patterns(
    model: Any,
    batches: Iterable[torch.Tensor],
    *,
    block_size: int,
    sparsity: float,
    sinks: int = 1,
    samples: int = 4,
    name: str = "",
) -> ModelPatterns:
    """Sinks and a window for each query head: those with the least error of outputs on texts.

    Heads of all layers together leave out a share of the visible blocks; ``samples`` queries of
    each block are looked at.
    """
    data = list(batches)
    length = length_of(data)
    sizes = window_sizes(length, block_size)
    make = partial(WindowErrors, sizes, block_size, sinks=sinks, samples=samples)
    errors = {layer: make() for layer in layers_by_index(model)}
    observe_model(model, {layer: x.observe for layer, x in errors.items()}, data)
    shares = {layer: x.shares() for layer, x in errors.items()}
    patterns = fit_windows(shares, sizes, length, block_size, sinks=sinks, sparsity=sparsity)
    return ModelPatterns(patterns, name, sparsity)

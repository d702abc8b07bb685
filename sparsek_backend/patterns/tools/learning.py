"""Learning the patterns of a model from texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sparsek_backend.patterns.learn import Heads
from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.models import learned_patterns, observe_model
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.prefill import PrefillPattern, ranked_entries
from sparsek_backend.patterns.training.heads import WindowErrors, fit_windows, window_sizes
from sparsek_backend.patterns.training.learned import ImportanceOptions, LearnedPattern
from sparsek_backend.patterns.training.pruning import Pruning


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
    """What vLLM's mode ``pattern`` follows, from the importance of blocks on texts.

    Args:
        model: a Transformers model, which attends everything meanwhile.
        batches: token ids ``[B, N]`` without padding, all of the same length.
        block_size: tokens of a block, as the server will select them.
        sinks: first key blocks, which the server attends anyway.
        window: latest key blocks, which the server attends anyway.
        importance: how it is measured; the mean over all batches by default.
        name: of the model, for the file.

    Raises:
        ValueError: no batches, or batches of several lengths.
    """
    learned = _observed(model, batches, block_size, "kv", importance)
    entries = {
        layer: ranked_entries(watched.importance(), sinks=sinks, window=window)
        for layer, watched in learned.items()
    }
    return PrefillPattern(entries, block_size, name)


def learn_patterns(
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
    """A model's patterns of a given sparsity, from the importance of blocks on texts.

    Unlike ``learn_model_patterns`` it looks at a few queries of each block, and may weigh them by
    what they add to the output.

    Args:
        model: a Transformers model, which attends everything meanwhile.
        batches: token ids ``[B, N]`` without padding, all of the same length.
        block_size: tokens along a side of a block.
        sparsity: share of the visible blocks to leave out.
        heads: who shares a pattern.
        importance: how it is measured; the mean over all batches by default.
        pruning: which blocks stay.
        name: of the model, for the file.

    Raises:
        ValueError: no batches, or batches of several lengths.
    """
    learned = _observed(model, batches, block_size, heads, importance)
    masses = [x.importance() for x in learned.values()]
    visible = [x.visible for x in learned.values()]
    masks = (pruning or Pruning()).masks(masses, visible, sparsity)
    patterns = {
        layer: BlockSparsePattern.from_mask(mask, block_size, mass=mass).to("cpu")
        for layer, mask, mass in zip(learned, masks, masses, strict=True)
    }
    return ModelPatterns(patterns, name, sparsity)


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

    Args:
        model: a Transformers model, which attends everything meanwhile.
        batches: token ids ``[B, N]`` without padding, all of the same length.
        block_size: tokens along a side of a block.
        sparsity: share of the visible blocks to leave out, of all heads together.
        sinks: first key blocks, which every head attends.
        samples: queries of each block that are looked at.
        name: of the model, for the file.

    Raises:
        ValueError: no batches, or batches of several lengths.
    """
    data = list(batches)
    length = _length(data)
    sizes = window_sizes(length, block_size)
    errors = {
        layer: WindowErrors(sizes, block_size, sinks=sinks, samples=samples)
        for layer in range(model.config.get_text_config().num_hidden_layers)
    }
    observe_model(model, errors, data)
    shares = {layer: x.shares() for layer, x in errors.items()}
    patterns = fit_windows(shares, sizes, length, block_size, sinks=sinks, sparsity=sparsity)
    return ModelPatterns(patterns, name, sparsity)


def _observed(
    model: Any,
    batches: Iterable[torch.Tensor],
    block_size: int,
    heads: Heads,
    importance: ImportanceOptions | None,
) -> dict[int, LearnedPattern]:
    """Patterns that watched the layers of a model on all batches, by layer index."""
    data = list(batches)
    length = _length(data)
    options = importance or ImportanceOptions(reduction="mean", window=len(data))
    learned = learned_patterns(model, length, block_size, heads=heads, importance=options)
    observe_model(model, learned, data)
    return learned


def _length(data: list[torch.Tensor]) -> int:
    lengths = sorted({ids.shape[1] for ids in data})
    if len(lengths) != 1:
        raise ValueError(f"batches: expected texts of one length, got lengths {lengths}")
    return lengths[0]

"""Learning the patterns of a model from texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.models import learned_patterns, observe_model
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.learned import Heads, ImportanceOptions
from sparsek_backend.patterns.training.pruning import Pruning


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
    data = list(batches)
    if len({ids.shape[1] for ids in data}) != 1:
        raise ValueError(
            "batches: expected texts of one length, got lengths "
            f"{sorted({ids.shape[1] for ids in data})}"
        )
    options = importance or ImportanceOptions(reduction="mean", window=len(data))
    learned = learned_patterns(model, data[0].shape[1], block_size, heads=heads, importance=options)
    observe_model(model, learned, data)
    patterns = {}
    for layer, watched in learned.items():
        mass = watched.importance()
        mask = (pruning or Pruning()).mask(mass, watched.visible, sparsity)
        patterns[layer] = BlockSparsePattern.from_mask(mask, block_size, mass=mass).to("cpu")
    return ModelPatterns(patterns, name, sparsity)

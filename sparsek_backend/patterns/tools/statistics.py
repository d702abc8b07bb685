"""What a pattern costs, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_backend.patterns.masses import visible_blocks
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.pruning import overlap

HISTOGRAM_BINS = 10
_SOFTMAX_FLOPS = 6
"""Per score: scale, maximum, difference, exponential, sum and the rescaling."""


@dataclass(frozen=True)
class Statistics:
    """Of one pattern, executed by every head once over its longest sequence."""

    patterns: int  # P
    density: float  # share of all blocks that is listed
    sparsity: float  # share of the visible blocks that is left out
    row_mean: float  # listed blocks per query block, on average
    row_std: float  # their standard deviation
    row_max: int  # the most
    # blocks that both of two patterns list over blocks that either lists, on average
    overlap: float
    # histogram of the listed blocks' weights over the largest one, in equal steps from 0 to 1;
    # empty without weights
    importance: list[int]
    bytes: int  # of the index tensors and weights
    dense_mask_bytes: int  # of a boolean mask over all tokens, for comparison
    flops: int  # of one forward pass of one sequence with ``heads`` heads
    tensor_core_share: float  # share of the flops that are matrix products


def pattern_statistics(
    pattern: BlockSparsePattern, *, head_dim: int = 64, heads: int | None = None
) -> Statistics:
    """The statistics of a pattern, under causality.

    Args:
        heads: query heads, P by default.
    """
    mask = pattern.mask().cpu()
    size, (rows, cols) = pattern.block_size, pattern.shape
    visible = visible_blocks(rows * size, cols * size, size, causal=True)
    seen = int((mask & visible).sum())
    per_row = mask.sum(2).double()
    tensors = [*pattern.tensors().values(), pattern.ccol_indices, pattern.row_indices]
    importance: list[int] = []
    if pattern.weights is not None and pattern.num_blocks:
        weights = pattern.weights.cpu() / pattern.weights.max().cpu().clamp(min=1e-30)
        importance = [int(x) for x in torch.histc(weights, HISTOGRAM_BINS, 0.0, 1.0)]
    scores = seen * size * size * (heads or pattern.num_patterns) // pattern.num_patterns
    products = 4 * head_dim * scores
    return Statistics(
        patterns=pattern.num_patterns,
        density=pattern.density,
        sparsity=1.0 - seen / max(pattern.num_patterns * int(visible.sum()), 1),
        row_mean=float(per_row.mean()) if per_row.numel() else 0.0,
        row_std=float(per_row.std(correction=0)) if per_row.numel() else 0.0,
        row_max=int(per_row.max()) if per_row.numel() else 0,
        overlap=overlap(mask),
        importance=importance,
        bytes=sum(x.numel() * x.element_size() for x in tensors),
        dense_mask_bytes=pattern.num_patterns * rows * cols * size * size,
        flops=products + _SOFTMAX_FLOPS * scores,
        tensor_core_share=4 * head_dim / (4 * head_dim + _SOFTMAX_FLOPS),
    )

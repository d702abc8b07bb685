"""Learning one layer's pattern from its queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparsek_backend.patterns.masses import sampled_block_masses, visible_blocks
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_backend.patterns.training.learned import Heads, num_patterns
from sparsek_backend.patterns.training.pruning import Pruning


def learn_pattern(
    samples: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    block_size: int,
    sparsity: float,
    heads: Heads = "kv",
    pruning: Pruning | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> BlockSparsePattern:
    """The blocks that add most to the output of one layer; what they add becomes their weight.

    Every query of the samples is looked at.

    Args:
        samples: q ``[B, N, Hq, D]``, k and v ``[B, M, Hkv, D]``, after their position embedding,
            all of the same lengths.
        block_size: tokens along a side of a block.
        sparsity: share of the visible blocks to leave out, from 0 to below 1.
        heads: who shares a pattern, by the mean over them: the query heads of a ``kv`` head,
            ``all``, or each ``query`` head on its own.
        pruning: which blocks stay; sinks, a window and the heaviest when ``None``.
        causal: whether queries see earlier keys only.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.

    Raises:
        ValueError: no samples, sizes that differ, or an argument out of range.
    """
    masses, sizes = [], set()
    for q, k, v in samples:
        if isinstance(q, torch.Tensor) and not q.numel():
            raise ValueError(f"samples: expected some queries, got q of shape {list(q.shape)}")
        mass = sampled_block_masses(
            q, k, v, block_size, measure="l2", samples=block_size,
            causal=causal, softmax_scale=softmax_scale,
        )  # fmt: skip
        masses.append(mass)
        sizes.add((q.shape[1], k.shape[1], q.shape[2], k.shape[2]))
    if len(sizes) != 1:
        raise ValueError(
            "samples: expected some of the same queries, keys, heads and KV heads, got "
            f"{sorted(sizes)}"
        )
    ((num_q, num_k, *num_heads),) = sizes
    mean = torch.stack(masses).mean(0).unflatten(0, (num_patterns(heads, *num_heads), -1)).mean(1)
    visible = visible_blocks(num_q, num_k, block_size, causal).to(mean.device)
    mask = (pruning or Pruning()).mask(mean, visible, sparsity)
    return BlockSparsePattern.from_mask(mask, block_size, mass=mean)

"""What the indexers' oracles share, in float64."""

from __future__ import annotations

import torch


def means_reference(k: torch.Tensor, size: int) -> torch.Tensor:
    """Means ``[N // size, Hkv, D]`` float64 of every ``size`` keys.  k: ``[N, Hkv, D]``."""
    count = k.shape[0] // size
    means: torch.Tensor = k[: count * size].double().unflatten(0, (count, size)).mean(1)
    return means


def block_logits_reference(
    q: torch.Tensor, vectors: torch.Tensor, per_block: int, softmax_scale: float
) -> torch.Tensor:
    """Block logits of one query: the best of each block's vectors.

    Args:
        q: ``[Hq, D]``; vectors: ``[n, Hkv, D]`` float64.

    Returns:
        ``[Hq, complete blocks]`` float64.
    """
    group = q.shape[0] // vectors.shape[1]
    blocks = vectors.shape[0] // per_block
    shared = vectors[: blocks * per_block].repeat_interleave(group, dim=1)  # [vectors, Hq, D]
    logits = torch.einsum("hd,chd->hc", q.double(), shared)
    highest: torch.Tensor = logits.unflatten(1, (blocks, per_block)).amax(-1)
    return highest * softmax_scale


def block_scores_reference(
    q: torch.Tensor, vectors: torch.Tensor, per_block: int, softmax_scale: float
) -> torch.Tensor:
    """Probabilities of blocks by their best vectors, summed over each GQA group.

    Args:
        q: ``[Hq, D]``; vectors: ``[n, Hkv, D]`` float64, ``per_block`` of each block.

    Returns:
        ``[Hkv, n // per_block]`` float64.
    """
    logits = block_logits_reference(q, vectors, per_block, softmax_scale)
    scores: torch.Tensor = logits.softmax(-1).unflatten(0, (vectors.shape[1], -1)).sum(1)
    return scores


def best(scores: torch.Tensor, blocks: range | list[int], count: int) -> list[int]:
    """The ``count`` best of ``blocks``, ascending; ties go to the lower index."""
    return sorted(sorted(blocks, key=lambda b: (-float(scores[b]), b))[:count])

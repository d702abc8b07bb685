"""What the indexers' oracles share, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_ONE = 1 << 16
"""A probability of 1."""


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


def threshold_reference(keys: torch.Tensor, count: int) -> int:
    """``ceil(32 log2 T)``; the sum of ``min(1, size / T)`` is ``count``.

    Args:
        keys: ``[n]`` integers, at least ``count`` of them.
        count: places of a list, 1 or more.
    """
    sizes = (keys.double() / 4).exp2().sort(descending=True).values
    rest = sizes.flip(0).cumsum(0).flip(0)[:count]  # of all but the n largest, for each n
    thresholds = rest / (count - torch.arange(count))
    certain = int((sizes[:count] > thresholds).sum())  # each n for which one more is above T
    # Where T is the size of a key, the last bits of a sum do not decide.
    return math.ceil(32 * math.log2(thresholds[certain]) - 1e-6)


def share_reference(steps: torch.Tensor) -> torch.Tensor:
    """Probabilities, int64 of 65536, of what has weights of these steps."""
    return (_ONE / (steps.double() / 32).exp2()).floor().long()


def start_reference(number: int) -> int:
    """What the sum of shares begins with, of 65536, of a position or a tile."""
    return number * 0x9E3779B1 % 2**32 // _ONE


def drawn_reference(shares: Iterable[int], start: int, count: int) -> list[int]:
    """Which of them, counted from 0, the sum of their shares draws: ``count`` at most."""
    found, total = [], start
    for index, share in enumerate(shares):
        before, total = total, total + share
        if total // _ONE > before // _ONE and before // _ONE < count:
            found.append(index)
    return found


def explained_reference(
    threshold: int,
    ranges: list[tuple[int, int]],
    drawn: dict[int, int],
    start: int,
    slack: int,
    most: int = 1 << 20,
) -> int:
    """How many, in the order of drawing, a threshold explains of what was drawn by other scores.

    What is drawn has the keys that its steps tell, what is not has one of the keys that its score
    may have.  So the sum of shares is known to lie in a range, which ends where nothing is left.

    Args:
        threshold: ``ceil(32 log2 T)``.
        ranges: least and greatest key of each.
        drawn: numbers of those that were drawn, and their steps.
        start: what the sum of shares begins with.
        slack: most error of a share.
        most: steps at most.
    """
    steps = [min(max(threshold - 8 * key, 0), most) for key in range(64)]
    shares = share_reference(torch.tensor(steps))
    sure = shares == _ONE
    least = torch.where(sure, _ONE, (shares - slack).clamp(min=0)).tolist()
    greatest = torch.where(sure, _ONE, (shares + slack).clamp(max=_ONE - 1)).tolist()
    low, high, count = start, start, 0
    for reached, (lowest, highest) in enumerate(ranges):
        if reached in drawn:
            keys = [key for key in range(lowest, highest + 1) if steps[key] == drawn[reached]]
            if not keys:
                return reached
            lowest, highest, count = keys[0], keys[-1], count + 1
        low = max(low + least[lowest], count * _ONE)
        high = min(high + greatest[highest], (count + 1) * _ONE - 1)
        if low > high:
            return reached
    return len(ranges)

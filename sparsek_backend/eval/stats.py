"""Statistics of paired scores: McNemar's exact test and bootstrap intervals, by SciPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
_RESAMPLES = 2000

Array = np.typing.NDArray[np.float64]


def mcnemar(reference: Sequence[bool], other: Sequence[bool]) -> tuple[int, int, float]:
    """McNemar's exact test of two runs, prompt by prompt.

    Returns:
        Prompts that the reference alone answers, those that the other alone does, and the two-sided
        p-value: how often chance alone would part them as unevenly.

    Raises:
        ValueError: they do not have the same number of prompts.
    """
    if len(reference) != len(other):
        raise ValueError(
            f"other: expected {len(reference)} prompts as in reference, got {len(other)}"
        )
    pairs = list(zip(reference, other, strict=True))
    lost = sum(before and not after for before, after in pairs)
    gained = sum(after and not before for before, after in pairs)
    if not lost + gained:
        return 0, 0, 1.0
    return lost, gained, float(stats.binomtest(lost, lost + gained, 0.5).pvalue)


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean of the groups' means, and the ends of its bootstrap interval.

    Prompts are drawn again within their group (a task), so that every draw has as many of each.

    Args:
        groups: the scores of every task; one for a single task.

    Raises:
        ValueError: no group, or an empty one.
    """
    samples = [np.asarray(group, dtype=np.float64) for group in groups]
    if not samples or not all(len(sample) for sample in samples):
        raise ValueError("groups: expected at least one score in each group, got none")
    mean = float(np.mean([sample.mean() for sample in samples]))
    if all(np.ptp(sample) == 0.0 for sample in samples):  # nothing to draw from
        return mean, mean, mean
    single = sum(float(sample[0]) for sample in samples if len(sample) == 1)  # no draw changes it
    several = [sample for sample in samples if len(sample) > 1]

    def macro_mean(*drawn: Array, axis: int = -1) -> Array:
        total = np.sum([sample.mean(axis=axis) for sample in drawn], axis=0)
        return (total + single) / len(samples)  # type: ignore[no-any-return]

    found = stats.bootstrap(
        several,
        macro_mean,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return mean, float(found.low), float(found.high)

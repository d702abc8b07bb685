"""Statistics of paired scores: McNemar's exact test, bootstrap intervals, KL divergence."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np

TOP = 20
"""Likeliest tokens of a place that are kept: as many as vLLM gives by default."""
MOST_PLACES = 512
_RESAMPLES = 2000
_SMALLEST = 1e-7
_LIKELY = np.dtype([("id", "<i4"), ("logprob", "<f4")])


def mcnemar(reference: Sequence[bool], other: Sequence[bool]) -> tuple[int, int, float]:
    """McNemar's exact test of two runs, prompt by prompt.

    Returns:
        Prompts that the reference alone answers, those that the other alone does, and the two-sided
        p-value: how often chance alone would part them as unevenly.
    """
    from scipy.stats import binomtest

    pairs = list(zip(reference, other, strict=True))
    lost = sum(before and not after for before, after in pairs)
    gained = sum(after and not before for before, after in pairs)
    if not lost + gained:
        return 0, 0, 1.0
    return lost, gained, float(binomtest(lost, lost + gained, 0.5).pvalue)


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean of the groups' means, and the ends of its 95 % bootstrap interval.

    Prompts are drawn again within their group (a task), so that every draw has as many of each.

    Args:
        groups: the scores of every task; one for a single task.

    Raises:
        ValueError: no group, or an empty one.
    """
    if not groups or not all(groups):
        raise ValueError("groups: expected at least one score in each group, got none")
    random = np.random.default_rng(0)
    samples = [np.asarray(group, dtype=np.float64) for group in groups]
    draws = [x[random.integers(len(x), size=(_RESAMPLES, len(x)))].mean(1) for x in samples]
    low, high = np.quantile(np.mean(draws, axis=0), [0.025, 0.975])
    return float(np.mean([x.mean() for x in samples])), float(low), float(high)


def pack(places: Sequence[Mapping[int, float]]) -> str:
    """The ``TOP`` likeliest tokens of each place with their log-probabilities, as base64.

    Of more than ``MOST_PLACES`` some are taken, evenly spread.
    """
    places = places[:: -(-len(places) // MOST_PLACES) or 1]
    packed = np.full((len(places), TOP), np.array((-1, -np.inf), _LIKELY))
    for row, place in zip(packed, places, strict=True):
        best = sorted(place.items(), key=lambda entry: -entry[1])[:TOP]
        row[: len(best)] = best
    return base64.b64encode(packed.tobytes()).decode()


def divergence(reference: str, other: str) -> np.typing.NDArray[np.float64]:
    """KL(reference || other) at each place, of two :func:`pack`.

    Tokens that both list count one by one, and all others as one: a lower bound of the divergence
    over the vocabulary.
    """
    old, new = (
        np.frombuffer(base64.b64decode(text), _LIKELY).reshape(-1, TOP)
        for text in (reference, other)
    )
    same = (old["id"][:, :, None] == new["id"][:, None]) & (old["id"] >= 0)[:, :, None]
    wanted = np.exp(old["logprob"].astype(np.float64)) * same.any(2)
    found = (np.exp(new["logprob"].astype(np.float64))[:, None] * same).sum(2)
    wanted, found = (
        np.maximum(np.c_[x, np.maximum(1.0 - x.sum(1), _SMALLEST)], _SMALLEST**2)
        for x in (wanted, found)
    )
    return np.asarray((wanted * np.log(wanted / found)).sum(1))

"""Sharing out a mean budget: to each KV head what it needs, by curves of missed mass."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from sparsek_backend.eval.curves import Curves, Head

PARTS = 4
"""Budgets are multiples of the mean over this, where it divides: few kernels serve a model."""
MOST = 4
"""Most that a head gets, in means."""


def step_of(mean: int) -> int:
    """Unit of all budgets: the largest divisor of ``mean`` up to a quarter of it."""
    return next(step for step in range(max(mean // PARTS, 1), 0, -1) if mean % step == 0)


def levels_of(mean: int) -> list[int]:
    """Budgets to measure before a mean is shared out."""
    step, most = step_of(mean), MOST * mean
    shares = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
    rounded = {max(round(mean * share / step), 1) * step for share in shares}
    return sorted(level for level in rounded if level <= most)


def falling_convex(values: Sequence[float]) -> list[float]:
    """The largest falling, convex curve that is nowhere above the values, at equal distances."""
    low = np.minimum.accumulate(np.asarray(values, dtype=float))
    hull: list[int] = []
    for i in range(len(low)):
        while len(hull) > 1 and _slope(low, hull[-2], hull[-1]) >= _slope(low, hull[-1], i):
            hull.pop()
        hull.append(i)
    return list(np.interp(range(len(low)), hull, low[hull]))


def _slope(values: np.typing.NDArray[np.float64], a: int, b: int) -> float:
    return float(values[b] - values[a]) / (b - a)


def share_out(curves: Curves, mean: int, *, by: str = "head") -> dict[int, list[int]]:
    """Budgets of every layer's KV heads, of the same mean, that miss least in all.

    Greedy water-filling: each step of the budget goes where the curves fall most.  That is the best
    there is, since the curves are convex.

    Args:
        mean: budget of each KV head, were they equal.
        by: ``head``, or ``layer`` for equal budgets within a layer.

    Returns:
        For each layer, one number for each KV head.
    """
    if by not in ("head", "layer"):
        raise ValueError(f"by: expected 'head' or 'layer', got {by!r}")
    step = step_of(mean)
    grid = np.arange(step, min(MOST * mean, curves.levels[-1]) + 1, step)
    if curves.levels[0] > step or grid[-1] < mean:
        raise ValueError(
            f"curves: expected levels from {step} to at least {mean}, got {curves.levels[0]} to "
            f"{curves.levels[-1]}"
        )
    heads = sorted(curves.missed)
    units: Mapping[Head, Sequence[float]] = curves.missed
    if by == "layer":
        layers = sorted({layer for layer, _ in heads})
        mine = {layer: [curves.missed[one] for one in heads if one[0] == layer] for layer in layers}
        units = {(layer, 0): list(np.mean(rows, axis=0)) for layer, rows in mine.items()}
    needs = {
        unit: falling_convex(np.interp(grid, curves.levels, row).tolist())
        for unit, row in units.items()
    }
    given = dict.fromkeys(needs, 0)  # index into the grid
    waiting = [(need[1] - need[0], unit) for unit, need in needs.items() if len(need) > 1]
    heapq.heapify(waiting)
    for _ in range(len(needs) * (mean - step) // step):
        _, unit = heapq.heappop(waiting)
        given[unit] += 1
        place, need = given[unit], needs[unit]
        if place + 1 < len(need):
            heapq.heappush(waiting, (need[place + 1] - need[place], unit))
    found: dict[int, list[int]] = {}
    for layer, head in heads:
        unit = (layer, head if by == "head" else 0)
        found.setdefault(layer, []).append(int(grid[given[unit]]))
    return found


def missed_of(curves: Curves, top_k: Mapping[int, Sequence[int]]) -> float:
    """Mean of the mass that heads miss with these budgets."""
    missed = [
        np.interp(top_k[layer][head], curves.levels, row)
        for (layer, head), row in curves.missed.items()
    ]
    return float(np.mean(missed))

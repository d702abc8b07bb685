"""The cheapest of some settings that hold a bar, found with few measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import MEAN


@dataclass(frozen=True)
class Loss:
    """Added NLL of the right answers against dense attention, in nats per token.

    Args:
        mean, low, high: with its 95 % interval, of the length and variant that lose most.
    """

    mean: float
    low: float
    high: float


def worst_loss(rows: Sequence[Row], label: str) -> Loss:
    """The loss of the budget with a label.

    Args:
        rows: of :func:`sparsek_backend.eval.results.retrieval_rows`.

    Raises:
        ValueError: it scored no prompt.
    """
    mine = [row for row in rows if row["label"] == label and "delta_nll" in row]
    cells = [row for row in mine if row["task"] == MEAN] or mine
    if not cells:
        raise ValueError(f"rows: expected scores of {label!r}, found none")
    worst = max(cells, key=lambda row: float(row["delta_nll_high"]))
    return Loss(worst["delta_nll"], worst["delta_nll_low"], worst["delta_nll_high"])


def cost_of(budget: Budget, lengths: Sequence[int]) -> float:
    """Attended share, mean of prefill and decode and of some lengths."""
    shares = (budget.prefill_share(n) + budget.decode_share(n) for n in lengths)
    return sum(shares) / 2 / len(lengths)


def cheapest(
    families: Sequence[Sequence[Budget]],
    cost: Callable[[Budget], float],
    holds: Callable[[Budget], bool],
) -> Budget | None:
    """The budget of least cost that holds, or ``None``.

    Args:
        families: budgets that differ in one thing each, in which more loses no more: a bisection
            finds the least of each that holds.
        cost: of a budget.
        holds: whether a budget holds; it is asked rarely.
    """
    best: Budget | None = None
    for family in families:
        worth = [b for b in sorted(family, key=cost) if best is None or cost(b) < cost(best)]
        low, high = 0, len(worth)
        while low < high:
            middle = (low + high) // 2
            if holds(worth[middle]):
                high = middle
            else:
                low = middle + 1
        if low < len(worth):
            best = worth[low]
    return best

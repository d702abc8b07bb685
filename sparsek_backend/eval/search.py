"""The cheapest of some settings that hold a bar, found with few measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import MEAN
from sparsek_backend.eval.stats import Interval


def worst_loss(rows: Sequence[Row], label: str) -> Interval:
    """Added NLL of a budget against dense attention, where it loses most, in nats per token.

    It is of the right answers, at the length and variant with the highest end of the interval.

    Args:
        rows: of :func:`sparsek_backend.eval.results.retrieval_rows`.
        label: the budget's.

    Raises:
        ValueError: it scored no prompt.
    """
    mine = [row for row in rows if row["label"] == label and "delta_nll" in row]
    cells = [row for row in mine if row["task"] == MEAN] or mine
    if not cells:
        raise ValueError(f"rows: expected scores of {label!r}, found none")
    worst = max(cells, key=lambda row: float(row["delta_nll_high"]))
    return Interval(worst["delta_nll"], worst["delta_nll_low"], worst["delta_nll_high"])


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

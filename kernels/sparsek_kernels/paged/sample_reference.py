"""Oracle of samples with weights, in float64, and what other lists may differ in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

_ONE = 1 << 16
"""A probability of 1."""


class Choice(NamedTuple):
    """What the new tokens of a request, or the queries of a tile, choose together.

    Args:
        scores: ``[Hkv, n]`` float64, of the far cells or blocks.
        keys: ``[Hkv, n]`` int64.
        steps: ``[Hkv, n]`` int64, 32 times the binary logs of the weights that they get.
        shares: ``[Hkv, n]`` int64, of 65536: how probable it is that they are drawn.
        start: of 65536: what the sum of shares begins with.
        entries: for each KV head, a list: ``cell + (steps << 21)`` in the order in which they are
            drawn, then -1.
        first: the first far cell or block.
        rows: what the scores of a KV head add up to at most.
        order: in which they are drawn.
    """

    scores: torch.Tensor
    keys: torch.Tensor
    steps: torch.Tensor
    shares: torch.Tensor
    start: int
    entries: list[list[int]]
    first: int
    rows: int
    order: Sequence[int]


def key_reference(scores: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """Integer keys, 0 to 63, of scores: quarters of octaves, the last one from ``rows / count``.

    Args:
        scores: float64, not negative.
        count: places of a list.
        rows: tokens that choose together, times query heads that share a KV head.
    """
    top = -math.floor(math.log2(max(count / rows, 1.0)))  # the octave of the last key
    fraction, exponent = torch.frexp(scores)  # scores are fraction * 2 ** exponent
    quarter = ((fraction - 0.5) * 8.0).floor()
    keys = 63 + 4 * (exponent - 1 - top) + quarter
    return torch.where(scores > 0.0, keys, 0.0).clamp(0, 63).long()


def threshold_reference(keys: torch.Tensor, count: int) -> int:
    """``ceil(32 log2 T)``; the sum of ``min(1, size / T)`` is ``count``.

    Args:
        keys: ``[cells]`` integers, of more than ``count`` cells.
        count: places of a list.
    """
    sizes = (keys.double() / 4).exp2().sort(descending=True).values
    rest = sizes.flip(0).cumsum(0).flip(0)[:count]  # of all but the n largest, for each n
    thresholds = rest / (count - torch.arange(count))
    certain = int((sizes[:count] > thresholds).sum())  # each n for which one more is above T
    # Where T is the size of a key, the last bits of a sum do not decide.
    return math.ceil(32 * math.log2(thresholds[certain]) - 1e-6)


def share_reference(steps: torch.Tensor) -> torch.Tensor:
    """Probabilities, int64 of 65536, of cells whose weights have these steps."""
    return (_ONE / (steps.double() / 32).exp2()).floor().long()


def start_reference(position: int) -> int:
    """What the sum of shares begins with, of 65536."""
    return position * 0x9E3779B1 % 2**32 // _ONE


def drawing_order(far: int) -> list[int]:
    """The order in which ``far`` cells are drawn: segments of 32, each 0, 8, 16, 24, 1, 9, ..."""
    return [cell for s in range(0, far, 32) for i in range(8) for cell in range(s + i, s + 32, 8)]


def draw_reference(
    steps: torch.Tensor,
    start: int,
    count: int,
    first: int,
    order: Sequence[int] | None = None,
) -> list[int]:
    """A list's entries, of ``count`` places, filled with -1.

    Args:
        steps: ``[n]`` of the weights of far cells or blocks.
        start: what the sum of shares begins with.
        count: places.
        first: the first far cell or block.
        order: of drawing, by default that of cells.
    """
    shares, total, entries = share_reference(steps).tolist(), start, []
    for cell in drawing_order(len(shares)) if order is None else order:
        before, total = total, total + shares[cell]
        if total // _ONE > before // _ONE:
            entries.append(first + cell + (min(int(steps[cell]), 1023) << 21))
    return entries + [-1] * (count - len(entries))


def draw_by_scores(
    scores: torch.Tensor,
    start: int,
    count: int,
    first: int,
    rows: int,
    *,
    order: Sequence[int] | None = None,
) -> Choice:
    """The choice of tokens with these scores.

    Where there are no more than ``count``, all are drawn.

    Args:
        scores: ``[Hkv, n]`` float64.
        start: what the sum of shares begins with, of 65536.
        count: places of a list.
        first: the first far cell or block.
        rows: what the scores of a KV head add up to at most.
        order: of drawing, by default that of cells.
    """
    keys = key_reference(scores, count, rows)
    order = drawing_order(scores.shape[1]) if order is None else order
    steps = torch.zeros_like(keys)
    if scores.shape[1] > count > 0:
        for row, mine in zip(steps, keys, strict=True):
            row.copy_((threshold_reference(mine, count) - 8 * mine).clamp(min=0))
    drawn = order if count else []
    entries = [draw_reference(row, start, count, first, drawn) for row in steps]
    return Choice(scores, keys, steps, share_reference(steps), start, entries, first, rows, order)


def list_error(choice: Choice, head: int, entries: Sequence[int], tolerance: float) -> str:
    """What is wrong with another list of a choice; empty where nothing is.

    A score that is a little off may move its cell to the next key, and that changes all draws
    behind it.  So a list is right if some scores within the tolerance explain it.  Their threshold
    is tried: every ``ceil(32 log2 T)`` from that of the lowest keys to that of the highest.  Then
    an entry's weight says which key its cell has, and a cell that is not drawn has one of the keys
    that its score may have.  So the sum of shares is known to lie in a range.  Every cell narrows
    this range, cell after cell in the order of drawing: behind it the sum has reached as many whole
    numbers as there are entries so far.  Where nothing is left of the range, no scores explain the
    list.

    With a tolerance of 0 that demands the oracle's list.  Above 0, sums are of float32 too: ``T``
    may be off by one step more, and each share by one 65536th.

    Args:
        choice: the oracle's.
        head: KV head.
        entries: its list: places of a list, -1 where they are not filled.
        tolerance: most relative error of a score.
    """
    scores, places = choice.scores[head], len(choice.entries[head])
    if len(entries) != places:
        return f"{len(entries)} places, not {places}"
    filled = [entry for entry in entries if entry >= 0]
    if list(entries[: len(filled)]) != filled or set(entries[len(filled) :]) - {-1}:
        return "places before the end are not filled, or entries are below -1"
    found = [(entry & ((1 << 21) - 1)) - choice.first for entry in filled]
    if found and not 0 <= min(found) <= max(found) < len(scores):
        return "cells that do not compete"
    order = choice.order
    place = {cell: n for n, cell in enumerate(order)}
    turns = [place[cell] for cell in found]
    if any(turn >= following for turn, following in pairwise(turns)):
        return "cells twice, or out of order"
    low, high = (
        key_reference(scores * (1.0 + error), places, choice.rows)
        for error in (-tolerance, tolerance)
    )
    slack = int(tolerance > 0.0)
    drawn = {cell: entry >> 21 for cell, entry in zip(found, filled, strict=True)}
    if len(order) <= places:
        return "" if sorted(drawn) == sorted(order) and not any(drawn.values()) else "not all"
    lowest, highest = (threshold_reference(keys, places) for keys in (low, high))
    each = zip(low.tolist(), high.tolist(), strict=True)
    ranges = dict(enumerate(each))
    reached = 0
    for threshold in range(lowest - slack, highest + slack + 1):
        explained = _explained(threshold, order, ranges, drawn, choice.start, slack)
        if explained == len(order):
            return ""
        reached = max(reached, explained)
    cell = order[reached]
    score, wanted = float(scores[cell]), int(choice.steps[head, cell])
    state = f"drawn with {drawn[cell]} steps" if cell in drawn else "not drawn"
    return f"cell {choice.first + cell} (score {score:.3g}, {wanted} steps) is {state}"


def _explained(
    threshold: int,
    order: Sequence[int],
    ranges: Mapping[int, tuple[int, int]],
    drawn: Mapping[int, int],
    start: int,
    slack: int,
) -> int:
    """How many cells, in the order of drawing, a threshold explains; see :func:`list_error`.

    Args:
        threshold: ``ceil(32 log2 T)``.
        order: of drawing.
        ranges: least and greatest key of each far cell.
        drawn: cells and their steps.
        start: what the sum of shares begins with.
        slack: most error of a share.
    """
    steps = [max(threshold - 8 * key, 0) for key in range(64)]
    shares = share_reference(torch.tensor(steps))
    sure = shares == _ONE
    least = torch.where(sure, _ONE, (shares - slack).clamp(min=0)).tolist()
    most = torch.where(sure, _ONE, (shares + slack).clamp(max=_ONE - 1)).tolist()
    low, high, count = start, start, 0
    for reached, cell in enumerate(order):
        lowest, highest = ranges[cell]
        if cell in drawn:
            keys = [key for key in range(lowest, highest + 1) if steps[key] == drawn[cell]]
            if not keys:
                return reached
            lowest, highest, count = keys[0], keys[-1], count + 1
        low = max(low + least[lowest], count * _ONE)
        high = min(high + most[highest], (count + 1) * _ONE - 1)
        if low > high:
            return reached
    return len(order)

"""Oracle of choosing by records, in float64, and what other lists may differ in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.record_reference import records_reference

_ONE = 1 << 16
"""A probability of 1."""


class Choice(NamedTuple):
    """What the new tokens of a request choose together.

    Args:
        scores: ``[Hkv, 32 * S]`` float64, of the far cells.
        keys: ``[Hkv, 32 * S]`` int64.
        steps: ``[Hkv, 32 * S]`` int64, 32 times the binary logs of the weights that cells get.
        shares: ``[Hkv, 32 * S]`` int64, of 65536: how probable it is that they are drawn.
        start: of 65536: what the sum of shares begins with.
        entries: for each KV head, a list: ``cell + (steps << 21)`` in the order in which they are
            drawn, then -1.
        first: the first far cell.
        rows: tokens times query heads that share a KV head.
    """

    scores: torch.Tensor
    keys: torch.Tensor
    steps: torch.Tensor
    shares: torch.Tensor
    start: int
    entries: list[list[int]]
    first: int
    rows: int


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


def draw_reference(steps: torch.Tensor, start: int, count: int, first: int) -> list[int]:
    """A list's entries, of ``count`` places, filled with -1.

    Args:
        steps: ``[cells]`` of the weights of far cells.
        start: what the sum of shares begins with.
        count: places.
        first: the first far cell.
    """
    shares, total, entries = share_reference(steps).tolist(), start, []
    for cell in drawing_order(len(shares)):
        before, total = total, total + shares[cell]
        if total // _ONE > before // _ONE:
            entries.append(first + cell + (int(steps[cell]) << 21))
    return entries + [-1] * (count - len(entries))


def choose_reference(
    q: torch.Tensor, k: torch.Tensor, position: int, policy: SelectionPolicy, softmax_scale: float
) -> Choice | None:
    """What the new tokens of one request choose, or ``None`` where they see everything.

    Args:
        q: ``[n, Hq, D]``, the queries from ``position`` on.
        k: ``[N, Hkv, D]``, keys from the first one on.
    """
    if policy.sees_all(position):
        return None
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    cells = policy.segment_blocks
    first, last = (block // cells for block in policy.candidate_range(position))
    own, far = position // 64, last - first  # the first token's segment; how many compete
    whole = k[first * 64 : own * 64].unflatten(0, (-1, 64)).transpose(1, 2)
    kept = records_reference(whole)  # [S, Hkv, ...], of those before its own
    grouped = q.double().unflatten(1, (heads, group)) * softmax_scale
    half = q.shape[-1] // 2
    logits = torch.einsum("thgd,shvd->thgsv", grouped, kept.vectors)
    squares = grouped[..., :half] ** 2 + grouped[..., half:] ** 2
    variance = torch.einsum("thgp,shp->thgs", squares, kept.variances)
    gain = (1.0 + variance).sqrt() - 1.0
    both = logits + math.log(2.0)  # of a cell's two keys
    scores = torch.zeros(heads, far, 32, dtype=torch.float64)
    for token, queries in enumerate(grouped):
        near = torch.cat([k[: first * 64], k[own * 64 : position + token + 1]]).double()
        exact = torch.einsum("hgd,nhd->hgn", queries, near)
        total = torch.logaddexp(exact.logsumexp(-1), both[token].flatten(2).logsumexp(-1))
        logs = both[token] + gain[token, ..., None] - total[..., None, None]
        scores += logs[..., :far, :].exp().sum(1)
    start = start_reference(position)
    scores = scores.flatten(1).nan_to_num(0.0)
    return draw_by_scores(scores, start, policy.scored_blocks, first * cells, len(q) * group)


def draw_by_scores(scores: torch.Tensor, start: int, count: int, first: int, rows: int) -> Choice:
    """The choice of tokens with these scores.

    Args:
        scores: ``[Hkv, 32 * S]`` float64, of more than ``count`` far cells.
        start: what the sum of shares begins with, of 65536.
        count: places of a list.
        first: the first far cell.
        rows: tokens times query heads that share a KV head.
    """
    keys = key_reference(scores, count, rows)
    thresholds = torch.tensor([[threshold_reference(row, count)] for row in keys])
    steps = (thresholds - 8 * keys).clamp(min=0)
    entries = [draw_reference(row, start, count, first) for row in steps]
    return Choice(scores, keys, steps, share_reference(steps), start, entries, first, rows)


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
    order = drawing_order(len(scores))
    place = {cell: n for n, cell in enumerate(order)}
    turns = [place[cell] for cell in found]
    if any(turn >= following for turn, following in pairwise(turns)):
        return "cells twice, or out of order"
    low, high = (
        key_reference(scores * (1.0 + error), places, choice.rows)
        for error in (-tolerance, tolerance)
    )
    slack = int(tolerance > 0.0)
    lowest, highest = (threshold_reference(keys, places) for keys in (low, high))
    drawn = dict(zip(found, (entry >> 21 for entry in filled), strict=True))
    ranges = list(zip(low.tolist(), high.tolist(), strict=True))
    reached = 0
    for threshold in range(lowest - slack, highest + slack + 1):
        explained = _explained(threshold, ranges, drawn, choice.start, slack)
        if explained == len(order):
            return ""
        reached = max(reached, explained)
    cell = order[reached]
    score, wanted = float(scores[cell]), int(choice.steps[head, cell])
    state = f"drawn with {drawn[cell]} steps" if cell in drawn else "not drawn"
    return f"cell {choice.first + cell} (score {score:.3g}, {wanted} steps) is {state}"


def _explained(
    threshold: int, ranges: list[tuple[int, int]], drawn: dict[int, int], start: int, slack: int
) -> int:
    """How many cells, in the order of drawing, a threshold explains; see :func:`list_error`.

    Args:
        threshold: ``ceil(32 log2 T)``.
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
    for reached, cell in enumerate(drawing_order(len(ranges))):
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
    return len(ranges)

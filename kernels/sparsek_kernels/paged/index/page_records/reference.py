"""Oracle of choosing by records, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.record_reference import records_reference


def key_reference(scores: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """Integer keys, 0 to 63, of scores: quarters of octaves, the last one from ``rows / count``.

    Args:
        scores: float64, not negative.
        count: cells that are chosen.
        rows: tokens that choose together, times query heads that share a KV head.
    """
    top = -math.floor(math.log2(max(count / rows, 1.0)))  # the octave of the last key
    fraction, exponent = torch.frexp(scores)  # scores are fraction * 2 ** exponent
    quarter = ((fraction - 0.5) * 8.0).floor()
    keys = 63 + 4 * (exponent - 1 - top) + quarter
    return torch.where(scores > 0.0, keys, 0.0).clamp(0, 63).long()


class Choice(NamedTuple):
    """What the new tokens of a request choose together, and what stands in for the rest.

    Args:
        cells: for each KV head, ascending.
        logits: ``[n, Hq, S]``, natural, of the segments' tails, from the first far one on.
        values: ``[S, Hkv, D]`` of these.
        scores: ``[Hkv, 32 * S]`` of the far cells.
        rows: tokens times query heads that share a KV head.
    """

    cells: list[list[int]]
    logits: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    rows: int


def swap_error(choice: Choice, head: int, first: int, mine: Iterable[int]) -> float:
    """How wrong scores must be, relatively, for other cells to be chosen.

    Infinity where there are more cells or fewer, or some that do not compete.

    Args:
        head: KV head.
        first: its first far cell.
        mine: the other cells.
    """
    scores, wanted = choice.scores[head], {cell - first for cell in choice.cells[head]}
    found = [cell - first for cell in mine]
    if len(set(found)) != len(wanted) or not 0 <= min(found) <= max(found) < len(scores):
        return math.inf
    keys = key_reference(scores, len(wanted), choice.rows)
    cut = int(keys[list(wanted)].min())
    missed, extra = list(wanted - set(found)), list(set(found) - wanted)
    error = 0.0
    if missed and cut < 63:
        highest = lowest_score(cut + 1, len(wanted), choice.rows)  # what the cut's key ends at
        error = max(error, float(scores[missed].max()) / highest - 1.0)
    if extra and cut > 0:
        lowest = lowest_score(cut, len(wanted), choice.rows)
        error = max(error, 1.0 - float(scores[extra].min()) / lowest)
    return error


def lowest_score(key: int, count: int, rows: int) -> float:
    """The smallest score of a key above 0; see :func:`key_reference`."""
    octave, quarter = divmod(key - 63, 4)
    top = -math.floor(math.log2(max(count / rows, 1.0)))
    return math.ldexp(1.0 + quarter / 4.0, top + octave)


def choose_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> Choice | None:
    """What the new tokens of one request choose, or ``None`` where they see everything.

    Args:
        q: ``[n, Hq, D]``, the queries from ``position`` on.
        k, v: ``[N, Hkv, D]``, keys and values from the first one on.
    """
    if policy.sees_all(position):
        return None
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    cells = policy.segment_blocks
    first, last = (block // cells for block in policy.candidate_range(position))
    own, far = position // 64, last - first  # the first token's segment; how many compete
    kept = records_reference(
        *(x[first * 64 : own * 64].unflatten(0, (-1, 64)).transpose(1, 2) for x in (k, v))
    )  # [S, Hkv, ...], of those before its own
    grouped = q.double().unflatten(1, (heads, group)) * softmax_scale
    half = q.shape[-1] // 2
    logits = torch.einsum("thgd,shvd->thgsv", grouped, kept.vectors)
    squares = grouped[..., :half] ** 2 + grouped[..., half:] ** 2
    variance = torch.einsum("thgp,shp->thgs", squares, kept.variances)
    gain = (1.0 + variance).sqrt() - 1.0
    both = logits + math.log(2.0)  # of a cell's two keys
    shares = torch.zeros(heads, far, 32, dtype=torch.float64)
    for token, queries in enumerate(grouped):
        near = torch.cat([k[: first * 64], k[own * 64 : position + token + 1]]).double()
        exact = torch.einsum("hgd,nhd->hgn", queries, near)
        total = torch.logaddexp(exact.logsumexp(-1), both[token].flatten(2).logsumexp(-1))
        scores = both[token] + gain[token, ..., None] - total[..., None, None]
        shares += scores[..., :far, :].exp().sum(1)
    rows = q.shape[0] * group
    shares = shares.flatten(1).nan_to_num(0.0)
    keys = key_reference(shares, policy.scored_blocks, rows)
    chosen, left = [], both[..., :far, :].clone()
    for head in range(heads):
        order = sorted(range(keys.shape[1]), key=lambda c: (-int(keys[head, c]), c))
        best = sorted(order[: policy.scored_blocks])
        left[:, head].flatten(2)[..., best] = -math.inf
        chosen.append([first * cells + cell for cell in best])
    tails = left.logsumexp(-1).flatten(1, 2)
    return Choice(chosen, tails, kept.value_means[:far], shares, rows)

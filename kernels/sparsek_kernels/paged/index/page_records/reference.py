"""Oracle of choosing by records, in float64."""

from __future__ import annotations

import math

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


def choose_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor] | None:
    """What the new tokens of one request choose together, and what stands in for the rest.

    Args:
        q: ``[n, Hq, D]``, the queries from ``position`` on.
        k, v: ``[N, Hkv, D]``, keys and values from the first one on.

    Returns:
        For each KV head ascending cells; natural logits ``[n, Hq, S]`` of the segments' tails, from
        the first one between sinks and window on; and their values ``[S, Hkv, D]``.  ``None`` where
        the tokens see everything.
    """
    if policy.sees_all(position):
        return None
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    cells = policy.segment_blocks
    first, last = (block // cells for block in policy.candidate_range(position))
    kept = records_reference(
        *(x[first * 64 : last * 64].unflatten(0, (-1, 64)).transpose(1, 2) for x in (k, v))
    )  # [S, Hkv, ...]
    grouped = q.double().unflatten(1, (heads, group)) * softmax_scale
    half = q.shape[-1] // 2
    logits = torch.einsum("thgd,shvd->thgsv", grouped, kept.vectors)
    squares = grouped[..., :half] ** 2 + grouped[..., half:] ** 2
    variance = torch.einsum("thgp,shp->thgs", squares, kept.variances)
    gain = (1.0 + variance).sqrt() - 1.0
    both = logits + math.log(2.0)  # of a cell's two keys
    shares = torch.zeros(heads, last - first, 32, dtype=torch.float64)
    for token, queries in enumerate(grouped):
        near = torch.cat([k[: first * 64], k[last * 64 : position + token + 1]]).double()
        exact = torch.einsum("hgd,nhd->hgn", queries, near)
        total = torch.logaddexp(exact.logsumexp(-1), both[token].flatten(2).logsumexp(-1))
        shares += (both[token] + gain[token, ..., None] - total[..., None, None]).exp().sum(1)
    rows = q.shape[0] * group
    keys = key_reference(shares.flatten(1).nan_to_num(0.0), policy.scored_blocks, rows)
    chosen, left = [], both.clone()
    for head in range(heads):
        order = sorted(range(keys.shape[1]), key=lambda c: (-int(keys[head, c]), c))
        best = sorted(order[: policy.scored_blocks])
        left[:, head].flatten(2)[..., best] = -math.inf
        chosen.append([first * cells + cell for cell in best])
    return chosen, left.logsumexp(-1).flatten(1, 2), kept.value_means

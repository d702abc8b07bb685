"""Oracle of choosing by records, in float64."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.record_reference import records_reference
from sparsek_kernels.paged.sample_reference import Choice, draw_by_scores, start_reference


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

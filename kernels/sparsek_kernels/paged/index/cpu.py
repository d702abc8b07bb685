"""What the indexers share in torch: the best blocks by score, for tokens that choose alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.cpu.plan import TokenScoring, plan_decodes, plan_prefill, plan_tokens
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy


@dataclass(frozen=True)
class Tokens:
    """Tokens that choose, each for itself: ``q [T, Hkv, G, D]``, and int64 ``[T]`` of each."""

    q: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    scoring: TokenScoring


Score = Callable[[Tokens], torch.Tensor]
"""Scores ``[T, Hkv, scoring.num_blocks]`` float32 of tokens, not negative."""


def list_best(scores: torch.Tensor, outside: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best blocks, ``[T, Hkv, count]`` int64, ascending; ties go to the lower index.

    ``scores [T, Hkv, blocks]``, not negative, are overwritten; blocks ``outside`` do not compete.
    """
    scores.masked_fill_(outside, -1.0)
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return ranked[..., :count].sort(dim=-1).values


def select_tokens(operands: PagedOperands, segment: Segment, score: Score) -> torch.Tensor:
    """Indices ``[tokens, Hkv, scored_blocks]`` of single tokens, -1 where all is seen.

    They are of decodes, or of prefills whose tiles are single tokens.
    """
    batch, policy = segment.batch, segment.policy
    q = operands.q.unflatten(1, (operands.heads, -1))
    lengths, counts = host_lengths(batch)
    chosen = new_indices(sum(counts), operands.heads, policy)

    def fill(rows: torch.Tensor | slice, tokens: Tokens) -> None:
        best = list_best(score(tokens), tokens.scoring.outside, policy.scored_blocks)
        chosen[rows] = best.to(torch.int32)

    if segment.decodes:
        plan = plan_decodes(batch, policy, operands.page_size)
        if plan.scoring is not None:
            rows = q.index_select(0, plan.rows)
            fill(plan.rows, Tokens(rows, plan.positions, plan.requests, plan.scoring))
        return chosen
    row = 0
    for request in range(batch.num_requests):
        start = lengths[request] - counts[request]
        token = batch.first_row + row
        prefill = plan_prefill(batch, request, policy, operands.k_cache)
        for first, tiles, group in prefill.groups:
            begin, end = max(first, prefill.dense_end, start), min(first + tiles, lengths[request])
            where = torch.arange(begin, end)
            part = q[token + begin - start : token + end - start]
            scoring = plan_tokens(group.table, where, policy)
            tokens = Tokens(part, where, torch.full_like(where, request), scoring)
            fill(slice(row + begin - start, row + end - start), tokens)
        row += counts[request]
    return chosen


def new_indices(tiles: int, heads: int, policy: SelectionPolicy) -> torch.Tensor:
    """Indices of tiles that see everything: ``[tiles, Hkv, scored_blocks]`` int32, all -1."""
    return torch.full((tiles, heads, policy.scored_blocks), -1, dtype=torch.int32)


def completed_blocks(batch: PagedBatch, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and index, int64, of the blocks of ``size`` tokens whose last token is new."""

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        found = [
            (request, block)
            for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True))
            for block in range((length - count) // size, length // size)
            if count
        ]
        requests, blocks = torch.tensor(found, dtype=torch.long).view(-1, 2).unbind(1)
        return requests, blocks

    return batch.derived(("completed blocks", size), build)

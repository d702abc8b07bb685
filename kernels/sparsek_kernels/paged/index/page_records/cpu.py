"""Choosing by records in torch, for tokens that choose each for itself."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.chosen import Chosen, Tail
from sparsek_kernels.paged.cpu.gather import read_sequence
from sparsek_kernels.paged.index.cpu import new_indices
from sparsek_kernels.paged.index.page_records.config import KEYS, first_key
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SEGMENT, SelectionPolicy, ceil_div
from sparsek_kernels.paged.record import VECTORS, read_variances, read_vectors, view_records

_LOG2E = 1.0 / math.log(2.0)


def select(operands: PagedOperands, segment: Segment) -> Chosen:
    """Torch form of :meth:`PageRecords.select`."""
    batch, policy = segment.batch, segment.policy
    lengths, counts = host_lengths(batch)
    tokens = sum(counts[: batch.num_decodes])
    chosen = new_indices(tokens, operands.heads, policy)
    segments = ceil_div(batch.max_seq_len, SEGMENT)
    logits = torch.full((tokens, operands.q.shape[1], segments), float("-inf"))
    row = 0
    for request in range(batch.num_decodes):
        start = lengths[request] - counts[request]
        for position in range(start, lengths[request]):
            if not policy.sees_all(position):
                pages = batch.block_table[request].long()
                chosen[row], logits[row] = _choose(operands, policy, row, position, pages, segments)
            row += 1
    return Chosen(chosen, Tail(logits, operands.summary))


def _choose(
    operands: PagedOperands,
    policy: SelectionPolicy,
    row: int,
    position: int,
    pages: torch.Tensor,
    segments: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells ``[Hkv, scored_blocks]`` of a token, and base-2 logits of tails ``[Hq, segments]``.

    Args:
        row: of the token's query.
        position: of the token.
        pages: ``[W]`` int64, its sequence's.
        segments: how many logits.
    """
    page_size, dim = operands.page_size, operands.q.shape[-1]
    q = operands.q[row].float().unflatten(0, (operands.heads, -1)) * operands.softmax_scale
    ranks = operands.ranks
    begin, end = (block // VECTORS for block in policy.candidate_range(position))
    which = torch.arange(begin, end)
    which = which[pages[which * SEGMENT // page_size] >= 0]  # not on another rank
    page, place = pages[which * SEGMENT // page_size], which % (page_size // SEGMENT)
    records = view_records(operands.summary, page_size, dim)
    records = records[page, :, place].transpose(0, 1)  # [Hkv, S, record]
    vectors = read_vectors(records, dim)  # [Hkv, S, 32, D]
    logits = torch.matmul(q, vectors.flatten(1, 2).mT).unflatten(-1, (-1, VECTORS))
    squares = q[..., : dim // 2].square() + q[..., dim // 2 :].square()
    variance = torch.matmul(squares, read_variances(records, dim).mT)
    gain = (1.0 + variance).sqrt() - 1.0
    key = torch.arange(position + 1)
    near = (key < begin * SEGMENT) | (key >= end * SEGMENT)
    near &= pages[key // page_size] >= 0
    near_keys = read_sequence(operands.k_cache, pages.clamp(min=0), position + 1)[:, near].float()
    both = logits + math.log(2.0)  # of a cell's two keys
    total = torch.cat([torch.matmul(q, near_keys.mT), both.flatten(2)], -1).logsumexp(-1)
    if ranks is not None:
        total = ranks.gather(total).logsumexp(0)
    scores = (both + (gain - total[..., None])[..., None]).exp().sum(1)
    found = torch.zeros(operands.heads, end - begin, VECTORS, dtype=torch.int8)
    found[:, which - begin] = cell_keys(scores, policy, operands.group).to(torch.int8)
    if ranks is not None:
        found = ranks.largest(found)
    order = torch.sort(found.flatten(1), dim=-1, descending=True, stable=True).indices
    best = order[:, : policy.scored_blocks].sort(-1).values
    taken = torch.zeros_like(found.flatten(1), dtype=torch.bool).scatter_(-1, best, True)
    taken = taken.unflatten(1, (-1, VECTORS))[:, which - begin]
    left = both.masked_fill(taken.unsqueeze(1), float("-inf")).logsumexp(-1) * _LOG2E
    tails = torch.full((operands.q.shape[1], segments), float("-inf"))
    tails[:, which] = left.flatten(0, 1)
    return (best + begin * VECTORS).to(torch.int32), tails


def cell_keys(scores: torch.Tensor, policy: SelectionPolicy, group: int) -> torch.Tensor:
    """Integer keys of float32 scores: their highest bits."""
    scores = scores.nan_to_num(0.0).clamp_(min=0.0)
    return ((scores.view(torch.int32) >> 21) - first_key(policy, group)).clamp_(0, KEYS - 1)

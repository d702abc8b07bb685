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
    begin, end = (block // VECTORS for block in policy.candidate_range(position))
    which = torch.arange(begin, end)
    records = view_records(operands.summary, page_size, dim)
    page, place = pages[which * SEGMENT // page_size], which % (page_size // SEGMENT)
    records = records[page, :, place].transpose(0, 1)  # [Hkv, S, record]
    vectors = read_vectors(records, dim)  # [Hkv, S, 32, D]
    logits = torch.matmul(q, vectors.flatten(1, 2).mT).unflatten(-1, (-1, VECTORS))
    squares = q[..., : dim // 2].square() + q[..., dim // 2 :].square()
    variance = torch.matmul(squares, read_variances(records, dim).mT)
    gain = (1.0 + variance).sqrt() - 1.0
    keys = read_sequence(operands.k_cache, pages, position + 1).float()
    near = torch.cat([keys[:, : begin * SEGMENT], keys[:, end * SEGMENT :]], 1)
    both = logits + math.log(2.0)  # of a cell's two keys
    total = torch.cat([torch.matmul(q, near.mT), both.flatten(2)], -1).logsumexp(-1)
    scores = (both + (gain - total[..., None])[..., None]).exp().sum(1).flatten(1)
    ranks = cell_keys(scores, policy, operands.group)
    count = policy.scored_blocks
    best = torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, :count]
    best = best.sort(-1).values
    taken = torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, best, True)
    left = both.masked_fill(taken.view(operands.heads, 1, -1, VECTORS), float("-inf"))
    found = torch.full((operands.q.shape[1], segments), float("-inf"))
    found[:, begin:end] = (left.logsumexp(-1) * _LOG2E).flatten(0, 1)
    return (best + begin * VECTORS).to(torch.int32), found


def cell_keys(scores: torch.Tensor, policy: SelectionPolicy, group: int) -> torch.Tensor:
    """Integer keys of float32 scores: their highest bits."""
    scores = scores.nan_to_num(0.0).clamp_(min=0.0)
    return ((scores.view(torch.int32) >> 21) - first_key(policy, group)).clamp_(0, KEYS - 1)

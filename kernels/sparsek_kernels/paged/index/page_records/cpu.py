"""Choosing by records in torch, for the tokens of a request together."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.gather import read_sequence
from sparsek_kernels.paged.index.cpu import new_indices
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SEGMENT, SelectionPolicy
from sparsek_kernels.paged.record import VECTORS, read_variances, read_vectors, view_records
from sparsek_kernels.paged.sample import keys_of, sample_cells, start_of


def select(operands: PagedOperands, segment: Segment) -> Chosen:
    """Torch form of :meth:`PageRecords.select`."""
    batch, policy = segment.batch, segment.policy
    lengths, counts = host_lengths(batch)
    chosen = new_indices(batch.num_decodes, operands.heads, policy)
    row = 0
    for request in range(batch.num_decodes):
        rows = slice(row, row + counts[request])
        position = lengths[request] - counts[request]
        if counts[request] and not policy.sees_all(position):
            pages = batch.block_table[request].long()
            chosen[request] = _choose(operands, policy, rows, position, pages)
        row = rows.stop
    return Chosen(chosen)


def _choose(
    operands: PagedOperands,
    policy: SelectionPolicy,
    rows: slice,
    position: int,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Entries ``[Hkv, scored_blocks]`` of a request's lists.

    Args:
        rows: of its ``n`` tokens' queries.
        position: of its first token.
        pages: ``[W]`` int64, its sequence's.
    """
    page_size, dim = operands.page_size, operands.q.shape[-1]
    q = operands.q[rows].float().unflatten(1, (operands.heads, -1)) * operands.softmax_scale
    count, group = q.shape[0], q.shape[2]
    q = q.transpose(0, 1).flatten(1, 2)  # [Hkv, n * G, D]
    ranks = operands.ranks
    begin, end = (block // VECTORS for block in policy.candidate_range(position))
    own = position // SEGMENT  # the first token's segment: those before it have records
    which = torch.arange(begin, own)
    which = which[pages[which * SEGMENT // page_size] >= 0]  # not on another rank
    page, place = pages[which * SEGMENT // page_size], which % (page_size // SEGMENT)
    records = view_records(operands.summary, page_size, dim)
    records = records[page, :, place].transpose(0, 1)  # [Hkv, S, record]
    vectors = read_vectors(records, dim)  # [Hkv, S, 32, D]
    logits = torch.matmul(q, vectors.flatten(1, 2).mT).unflatten(-1, (-1, VECTORS))
    squares = q[..., : dim // 2].square() + q[..., dim // 2 :].square()
    variance = torch.matmul(squares, read_variances(records, dim).mT)
    gain = (1.0 + variance).sqrt() - 1.0
    key = torch.arange(position + count)
    near = (key < begin * SEGMENT) | (key >= own * SEGMENT)
    near &= pages[key // page_size] >= 0
    keys = read_sequence(operands.k_cache, pages.clamp(min=0), position + count)[:, near].float()
    exact = torch.matmul(q, keys.mT).unflatten(1, (count, group))
    later = key[near] > position + torch.arange(count)[:, None]
    exact = exact.masked_fill(later[:, None], float("-inf")).flatten(1, 2)
    both = logits + math.log(2.0)  # of a cell's two keys
    total = torch.cat([exact, both.flatten(2)], -1).logsumexp(-1)
    if ranks is not None:
        total = ranks.gather(total).logsumexp(0)
    far = which < end
    which, both, gain = which[far], both[..., far, :], gain[..., far]
    scores = (both + (gain - total[..., None])[..., None]).exp().sum(1)
    found = torch.zeros(operands.heads, end - begin, VECTORS, dtype=torch.int8)
    found[:, which - begin] = keys_of(scores, policy.scored_blocks, q.shape[1]).to(torch.int8)
    if ranks is not None:
        found = ranks.largest(found)
    start = start_of(position)
    entries = torch.stack([sample_cells(keys, policy.scored_blocks, start) for keys in found])
    return torch.where(entries >= 0, entries + begin * VECTORS, -1)

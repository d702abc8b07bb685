"""Torch form of block selection: scores of single tokens and of tiles, the best blocks of each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.checks import given_summary
from sparsek_kernels.paged.cpu.gather import read_sequence
from sparsek_kernels.paged.cpu.plan import SummaryIndex, TokenScoring, not_competing, plan_decodes
from sparsek_kernels.paged.plan import first_sparse
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.sketch import VECTOR_SIZE, rotate

_QUERY_ROWS = 512
"""Queries that one pass scores by summaries: bounds its [queries, cells] scratch."""
_SAMPLE_ROWS = 32
"""Queries that one pass scores by keys: bounds its [queries, keys] scratch."""


def block_logits(
    q: torch.Tensor, summaries: torch.Tensor, policy: SelectionPolicy, softmax_scale: float
) -> torch.Tensor:
    """Best cell of every block.

    Args:
        q: ``[T, Hkv, M, D]``; summaries: ``[T, Hkv, c, D]`` float32.

    Returns:
        ``[T, Hkv, M, blocks]`` float32.
    """
    logits = torch.matmul(rotate(q) * softmax_scale, summaries.mT)
    per_block = policy.sel_block_size // VECTOR_SIZE
    cells = logits.view(*logits.shape[:3], -1, per_block)
    return cells.amax(-1)


def best_blocks(scores: torch.Tensor, outside: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best candidates, best first; ties go to the lower index.

    Args:
        scores: ``[T, Hkv, blocks]``, overwritten.
        outside: ``[T, 1, blocks]`` bool, blocks that do not compete.
    """
    scores.masked_fill_(outside, float("-inf"))
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def select_tokens(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    plan: TokenScoring,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of single tokens.  q: ``[T, Hkv, G, D]``; returns ``[T, Hkv, scored_blocks]``."""
    summaries = plan.index.read(k_summary, page_size, q.shape[-1], rule.sel_block_size)
    logits = block_logits(q, summaries, rule, softmax_scale)
    if plan.future is not None:
        logits.masked_fill_(plan.future, float("-inf"))  # blocks past the end may hold NaN
    scores = torch.softmax(logits, dim=-1).sum(2)
    return best_blocks(scores, plan.outside, rule.scored_blocks)


def select_rows(
    q: torch.Tensor,
    position: int,
    k_summary: torch.Tensor,
    index: SummaryIndex,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of a prefill's queries, each a tile of its own, by the rule of decodes.

    Args:
        q: ``[n, Hkv, G, D]``, queries from ``position`` on.
        index: summaries of (at least) the blocks before the last query's own.

    Returns:
        ``[n, Hkv, scored_blocks]`` int64.
    """
    count, heads, group, dim = q.shape
    blocks = (position + count - 1) // rule.sel_block_size
    summaries = index.read(k_summary, rule.sel_block_size)
    summaries = summaries[:, :, : blocks * rule.sel_block_size // VECTOR_SIZE]
    block = torch.arange(blocks)
    chosen = []
    for begin in range(0, count, _QUERY_ROWS):
        rows = q[begin : begin + _QUERY_ROWS]
        where = position + begin + torch.arange(rows.shape[0])
        flat = rows.permute(1, 2, 0, 3).reshape(1, heads, -1, dim)
        logits = block_logits(flat, summaries, rule, softmax_scale)
        logits = logits.view(heads, group, rows.shape[0], blocks)
        future = block >= (where // rule.sel_block_size)[:, None]
        probs = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1).sum(1)
        outside = not_competing(block, where, rule)
        chosen.append(best_blocks(probs.transpose(0, 1), outside, rule.scored_blocks))
    return torch.cat(chosen)


def sampled_rows(position: int, count: int, policy: SelectionPolicy) -> torch.Tensor:
    """Which of ``count`` queries from ``position`` on their tiles are scored by, ascending."""
    where = position + torch.arange(count)
    sample = where % policy.query_tile // policy.sample_stride
    last = torch.ones(count, dtype=torch.bool)
    last[:-1] = (sample[1:] != sample[:-1]) | (where[1:] % policy.query_tile == 0)
    return last.nonzero().squeeze(1)


def select_tiles(
    q: torch.Tensor,
    position: int,
    k: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of the consecutive tiles that hold a prefill's queries, by exact attention masses.

    Args:
        q: ``[n, Hkv, G, D]``, queries from ``position`` on.
        k: ``[Hkv, N, D]``, the sequence's keys up to the last query's own.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64.
    """
    count, heads, group, dim = q.shape
    tile, size = policy.query_tile, policy.sel_block_size
    blocks = ceil_div(position + count, size)
    first_tile = position // tile
    tiles = (position + count - 1) // tile - first_tile + 1
    scores = torch.zeros(tiles, heads, blocks)
    samples = sampled_rows(position, count, policy)
    for rows in samples.split(_SAMPLE_ROWS):
        where = position + rows
        keys = int(where[-1]) + 1
        flat = q[rows].float().permute(1, 2, 0, 3).reshape(heads, -1, dim)
        logits = torch.matmul(flat * softmax_scale, k[:, :keys].float().mT)
        logits = logits.view(heads, group, rows.shape[0], keys)
        seen = int(where[0])  # keys up to here are no query's future
        future = torch.arange(seen, keys) > where[:, None]
        logits[..., seen:].masked_fill_(future, float("-inf"))
        probs = torch.softmax(logits, dim=-1).sum(1)
        probs = F.pad(probs, (0, ceil_div(keys, size) * size - keys))
        mass = probs.unflatten(-1, (-1, size)).sum(-1).transpose(0, 1)
        scores[:, :, : mass.shape[-1]].index_add_(0, where // tile - first_tile, mass)
    starts = (first_tile + torch.arange(tiles)) * tile
    outside = not_competing(torch.arange(blocks), starts, policy)
    return best_blocks(scores, outside, policy.scored_blocks)


def select_prefill(
    q: torch.Tensor,
    position: int,
    k_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    index: SummaryIndex,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of one request's prefill from ``position`` on, none of whose queries sees everything.

    Args:
        q: ``[n, Hkv, G, D]``.
        k_cache: ``[P, Hkv, page_size, D]``.
        k_summary: needed for a ``query_tile`` of 1.
        index: the request's pages, and summaries of the blocks before its last query's own.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64.
    """
    if policy.query_tile == 1:
        return select_rows(q, position, given_summary(k_summary), index, policy, softmax_scale)
    k = read_sequence(k_cache, index.table[0], position + q.shape[0])
    return select_tiles(q, position, k, policy, softmax_scale)


def select_blocks_eager(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    k_summary: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """Torch form of :func:`sparsek_kernels.paged.select_blocks`, request after request.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64, ascending; -1 where a tile sees everything.
    """
    heads, page_size = k_cache.shape[1:3]
    grouped = q.unflatten(1, (heads, -1))
    lengths, counts = host_lengths(batch)

    def nothing(tiles: int) -> torch.Tensor:
        return torch.full((tiles, heads, policy.scored_blocks), -1, dtype=torch.int64)

    decoded = nothing(batch.num_decode_tokens)
    rule = policy.per_token()
    plan = plan_decodes(batch, rule, page_size)
    if plan.scoring is not None:
        rows = grouped.index_select(0, plan.rows)
        picked = select_tokens(rows, given_summary(k_summary), plan.scoring, rule, softmax_scale)
        decoded[plan.rows] = picked.sort(dim=-1).values
    chosen = [decoded]
    tile, tables = policy.query_tile, batch.pages(page_size)
    token = batch.first_row + sum(counts[: batch.num_decodes])
    for request in range(batch.num_decodes, batch.num_requests):
        length, end = lengths[request], token + counts[request]
        position = length - counts[request]
        begin = first_sparse(policy, position, length)
        found = nothing(policy.num_tiles(position, length))
        if begin < length:
            index = SummaryIndex(
                tables[request : request + 1], (length - 1) // policy.sel_block_size
            )
            rows = grouped[token + begin - position : end]
            picked = select_prefill(rows, begin, k_cache, k_summary, index, policy, softmax_scale)
            found[begin // tile - position // tile :] = picked.sort(dim=-1).values
        chosen.append(found)
        token = end
    return torch.cat(chosen)

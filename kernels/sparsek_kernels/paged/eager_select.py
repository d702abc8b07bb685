"""Torch form of block selection: scores from page summaries, the best blocks of each tile."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.eager_plan import (
    SummaryIndex,
    TokenScoring,
    not_competing,
    plan_decodes,
)
from sparsek_kernels.paged.plan import first_sparse
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, cell_size

_QUERY_ROWS = 512
"""Queries that one scoring pass handles: bounds its [queries, cells] scratch."""


def block_logits(
    q: torch.Tensor, summaries: torch.Tensor, policy: SelectionPolicy, softmax_scale: float
) -> torch.Tensor:
    """Best cell of every block.

    Args:
        q: ``[T, Hkv, M, D]``; summaries: ``[T, Hkv, c, D]`` float32.

    Returns:
        ``[T, Hkv, M, blocks]`` float32.
    """
    query = q.float() * softmax_scale
    if policy.score_kind == "cell_mean":
        logits = torch.matmul(query, summaries.mT)
    else:
        low, high = summaries[:, :, 0::2], summaries[:, :, 1::2]
        logits = torch.matmul(query.clamp(max=0.0), low.mT)
        logits += torch.matmul(query.clamp(min=0.0), high.mT)
    per_block = policy.sel_block_size // cell_size(policy.score_kind)
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
    summaries = plan.index.read(k_summary, rule.sel_block_size)
    logits = block_logits(q, summaries, rule, softmax_scale)
    if plan.future is not None:
        logits.masked_fill_(plan.future, float("-inf"))  # blocks past the end may hold NaN
    scores = torch.softmax(logits, dim=-1).sum(2)
    return best_blocks(scores, plan.outside, rule.scored_blocks)


def select_tiles(
    q: torch.Tensor,
    position: int,
    k_summary: torch.Tensor,
    index: SummaryIndex,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of the consecutive tiles that hold a prefill's queries.

    Args:
        q: ``[n, Hkv, G, D]``, queries from ``position`` on.
        index: summaries of (at least) the blocks before the last query's own.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64.
    """
    count, heads, group, _ = q.shape
    tile, size = policy.query_tile, policy.sel_block_size
    blocks = (position + count - 1) // size
    summaries = index.read(k_summary, size)[:, :, : blocks * size // CELL_SIZE]
    first_tile = position // tile
    tiles = (position + count - 1) // tile - first_tile + 1
    scores = torch.zeros(tiles, heads, blocks)
    block = torch.arange(blocks)
    for begin in range(0, count, _QUERY_ROWS):
        rows = q[begin : begin + _QUERY_ROWS]
        where = position + begin + torch.arange(rows.shape[0])
        flat = rows.permute(1, 2, 0, 3).reshape(1, heads, -1, rows.shape[-1])
        logits = block_logits(flat, summaries, policy, softmax_scale)
        logits = logits.view(heads, group, rows.shape[0], blocks)
        future = block >= (where // size)[:, None]
        probs = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1).sum(1)
        scores.index_add_(0, where // tile - first_tile, probs.transpose(0, 1))
    starts = (first_tile + torch.arange(tiles)) * tile
    return best_blocks(scores, not_competing(block, starts, policy), policy.scored_blocks)


def select_blocks_eager(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    softmax_scale: float,
    page_size: int,
) -> torch.Tensor:
    """Torch form of :func:`sparsek_kernels.paged.select_blocks`, request after request.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64, ascending; -1 where a tile sees everything.
    """
    grouped = q.unflatten(1, (k_summary.shape[1], -1))
    lengths, counts = host_lengths(batch)

    def nothing(tiles: int) -> torch.Tensor:
        shape = (tiles, k_summary.shape[1], policy.scored_blocks)
        return torch.full(shape, -1, dtype=torch.int64)

    decoded = nothing(batch.num_decode_tokens)
    rule = policy.per_token()
    plan = plan_decodes(batch, rule, page_size)
    if plan.scoring is not None:
        rows = grouped.index_select(0, plan.rows)
        picked = select_tokens(rows, k_summary, plan.scoring, rule, softmax_scale)
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
            picked = select_tiles(rows, begin, k_summary, index, policy, softmax_scale)
            found[begin // tile - position // tile :] = picked.sort(dim=-1).values
        chosen.append(found)
        token = end
    return torch.cat(chosen)

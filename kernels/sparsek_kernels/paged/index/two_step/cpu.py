"""Blocks of prefill tiles in torch: candidates by means, then exact block probabilities."""

from __future__ import annotations

import itertools

import torch

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.cpu.gather import block_reader, read_sequence
from sparsek_kernels.paged.cpu.plan import TileGroup, not_competing, plan_prefill
from sparsek_kernels.paged.index.cpu import NOTHING, list_best, new_indices
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy

_QUERY_ROWS = 512
"""Queries that one pass scores by means: bounds its [queries, cells] scratch."""


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Torch form of :meth:`TwoStep.select`."""
    batch, policy = segment.batch, segment.policy
    tile, scale = policy.query_tile, operands.softmax_scale
    q = operands.q.unflatten(1, (operands.heads, -1))
    lengths, counts = host_lengths(batch)
    parts = [new_indices(0, operands.heads, policy)]
    token = batch.first_row
    for length, count, request in zip(lengths, counts, range(batch.num_requests), strict=True):
        start = length - count
        chosen = new_indices(policy.num_tiles(start, length), operands.heads, policy)
        plan = plan_prefill(batch, request, policy, operands.k_cache)
        if plan.groups:
            means = cell_means(read_sequence(operands.k_cache, plan.table[0], length))
        for first, tiles, group in plan.groups:
            begin, end = max(first, plan.dense_end, start), min(first + tiles * tile, length)
            rows = q[token + begin - start : token + end - start]
            found = _select_group(rows, begin, first, group, operands.k_cache, means, policy, scale)
            row = first // tile - start // tile
            chosen[row : row + found.shape[0]] = found.to(torch.int32)
        parts.append(chosen)
        token += count
    return torch.cat(parts)


def _select_group(
    q: torch.Tensor,
    position: int,
    first: int,
    group: TileGroup,
    k_cache: torch.Tensor,
    means: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of neighbouring tiles of one request, ``[tiles, Hkv, scored_blocks]`` int64.

    Args:
        q: ``[n, Hkv, G, D]``, the tiles' queries, from ``position`` on.
        first: position of the first tile.
        group: the tiles.
        means: of :func:`cell_means`.
    """
    end = position + q.shape[0]
    tiles = (end - 1) // policy.query_tile - first // policy.query_tile + 1

    def samples(stride: int) -> tuple[torch.Tensor, torch.Tensor]:
        where = sampled_rows(first, tiles, position, end, policy.query_tile, stride)
        return q[(where - position).clamp(min=0)].permute(0, 2, 1, 3, 4), where

    listed = tile_candidates(*samples(policy.sample_stride), first, means, policy, softmax_scale)
    ranking = samples(policy.ranking_stride)
    return rank_blocks(*ranking, k_cache, group, listed, policy, softmax_scale)


def cell_means(k: torch.Tensor) -> torch.Tensor:
    """Means ``[Hkv, cells, D]`` float32 of a sequence's complete cells.  k: ``[Hkv, N, D]``."""
    cells = k.shape[1] // CELL_SIZE
    whole = k[:, : cells * CELL_SIZE].float().contiguous()
    return whole.view(k.shape[0], cells, CELL_SIZE, k.shape[2]).mean(2)


def tile_candidates(
    q: torch.Tensor,
    where: torch.Tensor,
    first: int,
    means: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Candidates of consecutive tiles.

    Args:
        q: ``[T, Hkv, S, G, D]``, the samples of each tile.
        where: ``[T, S]`` their positions; -1 where there is no such query.
        first: position of the first tile.
        means: ``[Hkv, cells, D]`` of (at least) the blocks before the last sample's own.

    Returns:
        ``[T, Hkv, listed]`` int64.
    """
    tiles, heads, samples, group, dim = q.shape
    size = policy.sel_block_size
    blocks = int(where.max()) // size
    per_block = size // CELL_SIZE
    block = torch.arange(blocks)
    vectors = means[:, : blocks * per_block].mT
    scores = torch.empty(tiles, heads, blocks)
    step = max(_QUERY_ROWS // samples, 1)
    for begin in range(0, tiles, step):
        here = slice(begin, begin + step)
        rows = q[here].float().transpose(0, 1).reshape(heads, -1, dim) * softmax_scale
        logits = torch.matmul(rows, vectors)
        logits = logits.view(heads, -1, samples, group, blocks, per_block).amax(-1)
        future = block >= (where[here] // size)[:, :, None, None]
        probs = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1)
        scores[here] = probs.nan_to_num_(0.0).sum((2, 3)).transpose(0, 1)  # of no query: nothing
    starts = first + torch.arange(tiles) * policy.query_tile
    return list_best(scores, not_competing(block, starts, policy), policy.listed_blocks)


def rank_blocks(
    q: torch.Tensor,
    where: torch.Tensor,
    k_cache: torch.Tensor,
    group: TileGroup,
    listed: torch.Tensor,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """The candidates with the largest block probability of a single sample.

    Args:
        q: ``[T, Hkv, S, G, D]``, the queries of each tile that rank.
        where: ``[T, S]`` their positions; -1 where there is no such query.
        group: the tiles.
        listed: ``[T, Hkv, n]`` int64 candidates.

    Returns:
        ``[T, Hkv, scored_blocks]`` int64, ascending.
    """
    size = rule.sel_block_size
    reader = block_reader(k_cache, size)
    names = group.names(reader, listed.clamp(max=group.num_blocks - 1), size)
    keys = reader.read(names).flatten(2, 3).float()  # [T, Hkv, (n + forced) * size, D]
    forced = group.forced.expand(-1, listed.shape[1], -1)
    blocks = torch.cat([listed, forced], dim=-1)
    positions = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(2)
    keys = keys[:, :, : positions.shape[-1]]
    given = torch.empty(*q.shape[:3], listed.shape[-1])
    for tile, head in itertools.product(range(q.shape[0]), range(q.shape[1])):  # near the caches
        logits = torch.matmul(q[tile, head].float() * softmax_scale, keys[tile, head].mT)
        future = positions[tile, head] > where[tile, :, None, None]
        shares = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1)
        masses = shares.unflatten(-1, (-1, size)).sum(-1)
        given[tile, head] = masses[..., : listed.shape[-1]].sum(1)
    given.nan_to_num_(0.0)  # of no query: nothing
    scores = given.amax(2).masked_fill_(listed == NOTHING, -1.0)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return listed.gather(-1, order[..., : rule.scored_blocks]).sort(dim=-1).values


def sampled_rows(
    first: int, tiles: int, begin: int, end: int, tile: int, stride: int
) -> torch.Tensor:
    """The last query of every ``stride`` positions of a tile; -1 for none.

    Args:
        first: position of the first tile.
        begin, end: positions of this chunk's queries.
        tile: positions of a tile.

    Returns:
        Positions, ``[tiles, ceil(tile / stride)]`` int64.
    """
    offset = torch.arange(0, tile, stride)
    low = first + torch.arange(tiles)[:, None] * tile + offset
    last_of_tile = low - offset + tile - 1
    last = torch.minimum(low + stride - 1, last_of_tile).clamp(max=end - 1)
    return torch.where(last >= low.clamp(min=begin), last, -1)

"""Blocks of prefill tiles in torch: a sample of candidates by means, then one by exact masses."""

from __future__ import annotations

import itertools
import math

import torch

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.cpu.gather import block_reader, read_sequence
from sparsek_kernels.paged.cpu.plan import TileGroup, not_competing, plan_prefill
from sparsek_kernels.paged.index.cpu import new_indices
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.sample import (
    CELL_BITS,
    CELL_MASK,
    MOST_STEPS,
    SECOND_SPREAD,
    SPREAD,
    STEPS,
    draw,
    keys_of,
    start_of,
)

_QUERY_ROWS = 512
"""Queries that one pass scores by means: bounds its [queries, cells] scratch."""


def select(
    operands: PagedOperands, segment: Segment, kept: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Torch form of :meth:`TwoStep.select`; ``kept`` gets the candidates of each request."""
    batch, policy = segment.batch, segment.policy
    tile, scale = policy.query_tile, operands.softmax_scale
    q = operands.q.unflatten(1, (operands.heads, -1))
    lengths, counts = host_lengths(batch)
    parts = [new_indices(0, operands.heads, policy)]
    token = batch.first_row
    for length, count, request in zip(lengths, counts, range(batch.num_requests), strict=True):
        start = length - count
        chosen = new_indices(policy.num_tiles(start, length), operands.heads, policy)
        listed = chosen.new_full((*chosen.shape[:2], policy.listed_blocks), -1)
        plan = plan_prefill(batch, request, policy, operands.k_cache)
        if plan.groups:
            means = cell_means(read_sequence(operands.k_cache, plan.table[0], length))
        for first, tiles, group in plan.groups:
            begin, end = max(first, plan.dense_end, start), min(first + tiles * tile, length)
            rows = q[token + begin - start : token + end - start]
            rule = policy.at(first)
            given = (rows, begin, first, group, operands.k_cache, means, rule, scale)
            candidates, found = _select_group(*given)
            row = first // tile - start // tile
            chosen[row : row + len(found), :, : found.shape[2]] = found.to(torch.int32)
            listed[row : row + len(found), :, : candidates.shape[2]] = candidates.to(torch.int32)
        parts.append(chosen)
        if kept is not None:
            kept.append(listed)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the candidates of neighbouring tiles of one request, ``[tiles, Hkv, at most
    listed_blocks]`` int64, and of their blocks, ``[tiles, Hkv, scored_blocks]`` int64.

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
    return listed, rank_blocks(*ranking, k_cache, group, first, listed, policy, softmax_scale)


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
        Entries ``[T, Hkv, at most listed_blocks]`` int64, -1 behind the last one.
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
    bases = first + torch.arange(tiles) * policy.query_tile
    competing = ~not_competing(block, bases, policy).expand_as(scores)
    places = min(policy.listed_blocks, blocks)
    keys = keys_of(scores, policy.listed_blocks, policy.samples * group)
    return draw(keys.long(), competing, places, _starts(bases, heads, SPREAD))


def _starts(positions: torch.Tensor, heads: int, spread: int) -> torch.Tensor:
    """What sums of probabilities start from, ``[T, Hkv]``.  positions: ``[T]``."""
    starts = torch.tensor([start_of(position, spread) for position in positions.tolist()])
    return starts[:, None].expand(-1, heads)


def rank_blocks(
    q: torch.Tensor,
    where: torch.Tensor,
    k_cache: torch.Tensor,
    group: TileGroup,
    first: int,
    listed: torch.Tensor,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """A sample of candidates by the largest block probability of a single sampled query.

    Args:
        q: ``[T, Hkv, S, G, D]``, the queries of each tile that rank.
        where: ``[T, S]`` their positions; -1 where there is no such query.
        group: the tiles.
        first: position of the first tile.
        listed: ``[T, Hkv, n]`` int64 entries of candidates.

    Returns:
        Entries ``[T, Hkv, scored_blocks]`` int64, blocks ascending.
    """
    size, there = rule.sel_block_size, listed >= 0
    steps = (listed >> CELL_BITS).where(there, 0)
    numbers = (listed & CELL_MASK).where(there, 0)
    reader = block_reader(k_cache, size)
    names = group.names(reader, numbers, size)
    keys = reader.read(names).flatten(2, 3).float()  # [T, Hkv, (n + forced) * size, D]
    forced = group.forced.expand(-1, listed.shape[1], -1)
    blocks = torch.cat([numbers, forced], dim=-1)
    positions = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(2)
    keys = keys[:, :, : positions.shape[-1]]
    given = torch.empty(*q.shape[:3], listed.shape[-1])
    logs = torch.where(there, steps.double() * (math.log(2.0) / STEPS), float("-inf")).float()
    logs = torch.cat([logs, torch.zeros(forced.shape)], dim=-1).repeat_interleave(size, dim=-1)
    logs = logs[..., : positions.shape[-1]]
    for tile, head in itertools.product(range(q.shape[0]), range(q.shape[1])):  # near the caches
        logits = torch.matmul(q[tile, head].float() * softmax_scale, keys[tile, head].mT)
        logits += logs[tile, head]
        future = positions[tile, head] > where[tile, :, None, None]
        shares = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1)
        masses = shares.unflatten(-1, (-1, size)).sum(-1)
        given[tile, head] = masses[..., : listed.shape[-1]].sum(1)
    given.nan_to_num_(0.0)  # of no query: nothing
    bases = first + torch.arange(q.shape[0]) * rule.query_tile
    rows = rule.ranking_samples * q.shape[3]
    keys = keys_of(given.amax(2), rule.scored_blocks, rows).long()
    found = draw(keys, there, rule.scored_blocks, _starts(bases, listed.shape[1], SECOND_SPREAD))
    drawn = (found & CELL_MASK).where(found >= 0, 0)  # places in the list of candidates
    steps = (steps.gather(-1, drawn) + (found >> CELL_BITS)).clamp(max=MOST_STEPS)
    return torch.where(found < 0, -1, numbers.gather(-1, drawn) + (steps << CELL_BITS))


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

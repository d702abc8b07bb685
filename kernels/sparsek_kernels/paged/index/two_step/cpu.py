"""Blocks of prefill tiles in torch: candidates by means, then exact block probabilities."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.cpu.gather import block_reader, read_sequence
from sparsek_kernels.paged.cpu.plan import TileGroup, not_competing, plan_prefill
from sparsek_kernels.paged.index.cpu import NOTHING, list_best, new_indices
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.sample import CELL_BITS, sample_blocks, start_of

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
    """What neighbouring tiles of one request choose, ``[tiles, Hkv, scored_blocks]`` int64.

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

    scores = tile_scores(*samples(policy.sample_stride), means, policy, softmax_scale)
    starts = first + torch.arange(tiles) * policy.query_tile
    outside = not_competing(torch.arange(scores.shape[-1]), starts, policy)
    listed = list_best(scores, outside, policy.listed_blocks)  # also sets scores outside to -1
    ranking = samples(policy.ranking_stride)
    given = listed_masses(*ranking, k_cache, group, listed, policy, softmax_scale)
    if policy.drawn:
        return draw_blocks(scores, listed, given, starts // policy.query_tile, policy)
    return rank_blocks(listed, given, policy.scored_blocks)


def cell_means(k: torch.Tensor) -> torch.Tensor:
    """Means ``[Hkv, cells, D]`` float32 of a sequence's complete cells.  k: ``[Hkv, N, D]``."""
    cells = k.shape[1] // CELL_SIZE
    whole = k[:, : cells * CELL_SIZE].float().contiguous()
    return whole.view(k.shape[0], cells, CELL_SIZE, k.shape[2]).mean(2)


def tile_scores(
    q: torch.Tensor,
    where: torch.Tensor,
    means: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores by means of the blocks before the last sample's own.

    Args:
        q: ``[T, Hkv, S, G, D]``, the samples of each tile.
        where: ``[T, S]`` their positions; -1 where there is no such query.
        means: ``[Hkv, cells, D]`` of (at least) these blocks.

    Returns:
        ``[T, Hkv, blocks]`` float32.
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
    return scores


def listed_masses(
    q: torch.Tensor,
    where: torch.Tensor,
    k_cache: torch.Tensor,
    group: TileGroup,
    listed: torch.Tensor,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """What the samples of tiles give to candidates, 0 where there is no query or no candidate.

    Args:
        q: ``[T, Hkv, S, G, D]``, the queries of each tile that rank.
        where: ``[T, S]`` their positions; -1 where there is no such query.
        group: the tiles.
        listed: ``[T, Hkv, n]`` int64 candidates.

    Returns:
        ``[T, Hkv, S, G, n]`` float32.
    """
    size = rule.sel_block_size
    reader = block_reader(k_cache, size)
    names = group.names(reader, listed.clamp(max=group.num_blocks - 1), size)
    keys = reader.read(names).flatten(2, 3).float()  # [T, Hkv, (n + forced) * size, D]
    forced = group.forced.expand(-1, listed.shape[1], -1)
    blocks = torch.cat([listed, forced], dim=-1)
    positions = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(2)
    keys = keys[:, :, : positions.shape[-1]]
    given = torch.empty(*q.shape[:4], listed.shape[-1])
    for tile, head in itertools.product(range(q.shape[0]), range(q.shape[1])):  # near the caches
        logits = torch.matmul(q[tile, head].float() * softmax_scale, keys[tile, head].mT)
        future = positions[tile, head] > where[tile, :, None, None]
        shares = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1)
        given[tile, head] = shares.unflatten(-1, (-1, size)).sum(-1)[..., : listed.shape[-1]]
    return given.nan_to_num_(0.0)


def rank_blocks(listed: torch.Tensor, given: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` candidates that a single sample gives most, ``[T, Hkv, count]``, ascending.

    Args:
        listed: ``[T, Hkv, n]`` int64 candidates.
        given: of :func:`listed_masses`.
    """
    scores = given.sum(3).amax(2).masked_fill_(listed == NOTHING, -1.0)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return listed.gather(-1, order[..., :count]).sort(dim=-1).values


def draw_blocks(
    scores: torch.Tensor,
    listed: torch.Tensor,
    given: torch.Tensor,
    tile: torch.Tensor,
    policy: SelectionPolicy,
) -> torch.Tensor:
    """A sample of blocks, ``[T, Hkv, scored_blocks]`` int64 entries, ascending, then -1.

    Args:
        scores: ``[T, Hkv, blocks]`` of :func:`tile_scores`, -1 for blocks that do not compete.
        listed: ``[T, Hkv, n]`` int64 candidates.
        given: of :func:`listed_masses`.
        tile: ``[T]`` numbers of the tiles.
    """
    places, blocks = policy.scored_blocks, scores.shape[-1]
    there = listed < blocks
    spare = torch.where(there, listed, blocks)  # one more column for those that are none
    others = F.pad(scores != -1.0, (0, 1)).scatter(-1, spare, False)[..., :blocks]
    count = others.sum(-1, keepdim=True).clamp(max=policy.other_blocks)
    start = torch.tensor([start_of(t) for t in tile.tolist()]).view(-1, 1, 1)
    exact = given.square().sum((2, 3)).sqrt()
    drawn = F.pad(sample_blocks(scores, others, count, start), (0, 1), value=-1)
    steps = sample_blocks(exact, there, places - count, start)
    drawn = drawn.scatter(-1, spare, steps)[..., :blocks]
    entries = torch.where(drawn < 0, -1, torch.arange(blocks) + (drawn << CELL_BITS))
    order = torch.argsort(drawn < 0, dim=-1, stable=True)[..., :places]
    return entries.gather(-1, order)


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

"""Blocks of prefill tiles in torch: a sample by what queries give to means of keys."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.cpu.gather import read_sequence
from sparsek_kernels.paged.cpu.plan import not_competing, plan_prefill
from sparsek_kernels.paged.index.cpu import new_indices
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, ceil_div
from sparsek_kernels.paged.sample import draw, keys_of, start_of

_QUERY_ROWS = 512
"""Queries that are scored at once: bounds the scratch ``[queries, cells]``."""


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Torch form of :meth:`CellMeans.select`."""
    batch, policy = segment.batch, segment.policy
    tile, stride = policy.query_tile, policy.sample_stride
    q = operands.q.unflatten(1, (operands.heads, -1))
    lengths, counts = host_lengths(batch)
    step = max(_QUERY_ROWS // policy.samples, 1)
    parts = [new_indices(0, operands.heads, policy)]
    token = batch.first_row
    for length, count, request in zip(lengths, counts, range(batch.num_requests), strict=True):
        start = length - count
        chosen = new_indices(policy.num_tiles(start, length), operands.heads, policy)
        plan = plan_prefill(batch, request, policy, operands.k_cache)
        if plan.groups:
            means = cell_means(read_sequence(operands.k_cache, plan.table[0], length))
            first, begin = plan.groups[0][0], max(plan.dense_end, start)
            for base in range(first, length, step * tile):
                tiles = min(step, ceil_div(length - base, tile))
                where = sampled_rows(base, tiles, begin, length, tile, stride)
                rows = q[(where - start + token).clamp(min=0)].permute(0, 2, 1, 3, 4)
                found = choose(rows, where, base, means, policy, operands.softmax_scale)
                row = base // tile - start // tile
                chosen[row : row + tiles, :, : found.shape[2]] = found.to(torch.int32)
        parts.append(chosen)
        token += count
    return torch.cat(parts)


def cell_means(k: torch.Tensor) -> torch.Tensor:
    """Means ``[Hkv, cells, D]`` float32 of a sequence's complete cells.  k: ``[Hkv, N, D]``."""
    cells = k.shape[1] // CELL_SIZE
    whole = k[:, : cells * CELL_SIZE].float().contiguous()
    return whole.view(k.shape[0], cells, CELL_SIZE, k.shape[2]).mean(2)


def choose(
    q: torch.Tensor,
    where: torch.Tensor,
    first: int,
    means: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks of consecutive tiles.

    Args:
        q: ``[T, Hkv, S, G, D]``, the samples of each tile.
        where: ``[T, S]`` their positions; -1 where there is no such query.
        first: position of the first tile.
        means: ``[Hkv, cells, D]`` of (at least) the blocks before the last sample's own.

    Returns:
        Entries ``[T, Hkv, at most scored_blocks]`` int64, blocks ascending, -1 behind the last one.
    """
    tiles, heads, samples, group, dim = q.shape
    size = policy.sel_block_size
    blocks = int(where.max()) // size
    per_block = size // CELL_SIZE
    block = torch.arange(blocks)
    rows = q.float().transpose(0, 1).reshape(heads, -1, dim) * softmax_scale
    logits = torch.matmul(rows, means[:, : blocks * per_block].mT)
    logits = logits.view(heads, tiles, samples, group, blocks, per_block).amax(-1)
    future = block >= (where // size)[:, :, None, None]
    probs = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1)
    scores = probs.nan_to_num_(0.0).sum((2, 3)).transpose(0, 1)  # of no query: nothing
    bases = first + torch.arange(tiles) * policy.query_tile
    competing = ~not_competing(block, bases, policy).expand_as(scores)
    keys = keys_of(scores.contiguous(), policy.scored_blocks, policy.samples * group)
    starts = torch.tensor([start_of(base) for base in bases.tolist()])[:, None].expand(-1, heads)
    return draw(keys.long(), competing, min(policy.scored_blocks, blocks), starts)


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

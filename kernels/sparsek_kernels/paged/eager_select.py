"""Torch form of block selection: scores from page summaries, the best blocks of each tile."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from sparsek_kernels.paged.gather import RunReader
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy

_QUERY_ROWS = 512
"""Queries that one scoring pass handles: bounds its [queries, cells] scratch."""


@dataclass(frozen=True)
class SummaryIndex:
    """Where the summaries of some sequences' first blocks are; shared by layers.

    Args:
        table: ``[T, W]`` int64 page table rows.
        num_blocks: blocks to score.
    """

    table: torch.Tensor
    num_blocks: int
    _names: dict[Hashable, torch.Tensor] = field(default_factory=dict, repr=False)

    def read(self, k_summary: torch.Tensor, sel_block_size: int) -> torch.Tensor:
        """``[T, Hkv, vectors of num_blocks, D]`` float32 from ``[P, Hkv, vectors, D]``."""
        reader = RunReader(k_summary, k_summary.shape[2])
        vectors = self.num_blocks * sel_block_size // CELL_SIZE
        names = self._names.get(reader.geometry)
        if names is None:
            pages = self.table[:, : -(-vectors // reader.page_size)].unsqueeze(1)
            names = self._names.setdefault(reader.geometry, reader.locate(pages))
        rows = reader.read(names)
        return rows.reshape(*names.shape[:2], -1, reader.dim)[:, :, :vectors].float()


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
        cell_size = CELL_SIZE
    else:
        low, high = summaries[:, :, 0::2], summaries[:, :, 1::2]
        logits = torch.matmul(query.clamp(max=0.0), low.mT)
        logits += torch.matmul(query.clamp(min=0.0), high.mT)
        cell_size = 2 * CELL_SIZE
    cells = logits.view(*logits.shape[:3], -1, policy.sel_block_size // cell_size)
    return cells.amax(-1)


def best_blocks(scores: torch.Tensor, outside: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best candidates, best first; ties go to the lower index.

    Args:
        scores: ``[T, Hkv, blocks]``, overwritten.
        outside: ``[T, 1, blocks]`` bool, blocks that do not compete.
    """
    scores.masked_fill_(outside, float("-inf"))
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def _outside(block: torch.Tensor, position: torch.Tensor, rule: SelectionPolicy) -> torch.Tensor:
    """``[T, 1, blocks]`` bool: blocks that do not compete for the tiles at ``position`` ``[T]``."""
    first, last = (edge[:, None, None] for edge in rule.candidate_range(position))
    outside: torch.Tensor = (block < first) | (block >= last)
    return outside


@dataclass(frozen=True)
class TokenScoring:
    """Scoring of single tokens, each a tile of its own (decodes)."""

    index: SummaryIndex
    future: torch.Tensor | None  # [T, 1, 1, blocks] bool: a token's own block and later ones
    outside: torch.Tensor  # [T, 1, blocks] bool


def plan_tokens(
    table: torch.Tensor, positions: torch.Tensor, rule: SelectionPolicy
) -> TokenScoring:
    """Index tensors to score ``T`` tokens.  table: ``[T, W]``; positions: ``[T]``."""
    own = positions // rule.sel_block_size
    block = torch.arange(int(own.max()))
    future = block >= own[:, None]
    outside = _outside(block, positions, rule)
    return TokenScoring(
        index=SummaryIndex(table, block.shape[0]),
        future=future[:, None, None] if future.any() else None,
        outside=outside,
    )


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
    return best_blocks(scores, _outside(block, starts, policy), policy.scored_blocks)

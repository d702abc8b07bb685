"""Index tensors of the torch path: what depends on the batch and the policy alone.

They are built once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.cpu.gather import RunReader, locate_blocks, pick_blocks
from sparsek_kernels.paged.plan import first_sparse
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

_GATHER_ELEMENTS = 1 << 22
"""Elements of K that one group of tiles may gather: bounds scratch, keeps it near the caches."""


def not_competing(
    block: torch.Tensor, position: torch.Tensor, rule: SelectionPolicy
) -> torch.Tensor:
    """``[T, 1, blocks]`` bool: blocks that do not compete for the tiles at ``position`` ``[T]``."""
    first, last = (edge[:, None, None] for edge in rule.candidate_range(position))
    outside: torch.Tensor = (block < first) | (block >= last)
    return outside


@dataclass(frozen=True)
class TokenScoring:
    """Scoring of single tokens, each a tile of its own (decodes)."""

    table: torch.Tensor  # [1 or T, W] int64 page table rows
    num_blocks: int  # blocks to score, the first ones of the sequences
    future: torch.Tensor | None  # [T, 1, blocks] bool, a token's own block and later ones
    outside: torch.Tensor  # [T, 1, blocks] bool, blocks that do not compete


def plan_tokens(
    table: torch.Tensor, positions: torch.Tensor, rule: SelectionPolicy
) -> TokenScoring:
    """Index tensors to score ``T`` tokens.  table: ``[T, W]``; positions: ``[T]``."""
    own = positions // rule.sel_block_size
    block = torch.arange(int(own.max()))
    future = (block >= own[:, None])[:, None]
    outside = not_competing(block, positions, rule)
    return TokenScoring(table, block.shape[0], future if future.any() else None, outside)


@dataclass(frozen=True)
class TileGroup:
    """Tiles that attend equally many blocks: selected ones, then sinks, then local ones.

    ``bias [1 or T, 1, Q, num_keys]`` is 0 or -inf over the keys in that order, ``None`` where every
    query sees them all.
    """

    table: torch.Tensor  # [1 or T, W] int64 page table rows
    forced: torch.Tensor  # [T, 1, sinks + locals] int64 blocks
    num_keys: int  # of a tile, up to the last one that any query sees
    bias: torch.Tensor | None
    stale: torch.Tensor | None  # [T, 1, last keys, 1] bool, keys past the sequence's end
    num_blocks: int  # of the longest sequence
    _bias: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)
    _located: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )

    def bias_as(self, dtype: torch.dtype) -> torch.Tensor | None:
        """:attr:`bias` in the dtype of the queries."""
        if self.bias is None:
            return None
        if dtype not in self._bias:
            self._bias[dtype] = self.bias.to(dtype)
        return self._bias[dtype]

    def names(
        self, reader: RunReader, selected: torch.Tensor | None, sel_block_size: int
    ) -> torch.Tensor:
        """Runs to read, ``[T, Hkv, n]``.  selected: ``[T, Hkv, s]`` blocks, or ``None``."""
        located = self._located.get(reader.geometry)
        if located is None:
            every = locate_blocks(reader, self.table, self.num_blocks, sel_block_size)
            blocks = self.forced.clamp(max=self.num_blocks - 1).expand(-1, reader.heads, -1)
            located = self._located.setdefault(reader.geometry, (every, pick_blocks(every, blocks)))
        every, forced = located
        if selected is None:
            return forced
        return torch.cat([pick_blocks(every, selected), forced], dim=-1)


def make_tile_group(
    table: torch.Tensor,
    first_position: torch.Tensor,
    rows: int,
    seq_lens: torch.Tensor,
    policy: SelectionPolicy,
    deciding: torch.Tensor | None = None,
) -> TileGroup:
    """Index tensors for ``T`` tiles of ``rows`` queries that do not see everything.

    Args:
        table: ``[1 or T, W]``; first_position: ``[T]`` position of each tile's first query;
        seq_lens: ``[T]``.
        deciding: ``[T]`` position that decides where each tile's window begins, at or before its
            first query, which is the default.
    """
    size = policy.sel_block_size
    window = policy.window_size or 1
    tiles = first_position.shape[0]
    if policy.selects_blocks:
        deciding = first_position if deciding is None else deciding
        first_local, _ = policy.local_range(deciding)
        span = policy.local_blocks + ceil_div(int((first_position - deciding).max()), size)
    else:
        first_local = (first_position - window + 1).clamp_(min=0) // size
        span = ceil_div(window + rows - 2, size) + 1
    sink = torch.arange(policy.sink_blocks).expand(tiles, -1)
    forced = torch.cat([sink, first_local[:, None] + torch.arange(span)], dim=1)
    keys = (forced[:, :, None] * size + torch.arange(size)).flatten(1)  # [T, forced keys]
    key = keys[:, None, :]
    query = (first_position[:, None] + torch.arange(rows))[:, :, None]
    seen = key <= query
    selected_keys = 0
    if policy.selects_blocks:
        selected_keys = policy.scored_blocks * size
    else:
        is_sink = torch.arange(keys.shape[1]) < policy.sink_blocks * size
        within = (key > query - window) & (key >= policy.num_sink)
        seen &= torch.where(is_sink, key < policy.num_sink, within)
    used = int(seen.any(0).any(0).nonzero()[-1]) + 1
    keys, seen = keys[:, :used], seen[..., :used]
    bias = None
    if not seen.all():
        bias = torch.zeros(tiles, rows, selected_keys + used)
        bias[..., selected_keys:].masked_fill_(~seen, float("-inf"))
        if tiles > 1 and bool((bias == bias[:1]).all()):
            bias = bias[:1]
    stale = keys >= seq_lens[:, None]
    stale_keys = stale.any(0).nonzero()
    return TileGroup(
        table=table,
        forced=forced.unsqueeze(1),
        num_keys=selected_keys + used,
        bias=None if bias is None else bias.unsqueeze(1),
        stale=stale[:, None, int(stale_keys[0]) :, None] if stale_keys.numel() else None,
        num_blocks=int((seq_lens.max() - 1) // size) + 1,
    )


@dataclass(frozen=True)
class DecodePlan:
    """Decoded tokens of a step: those that see everything, and those that do not."""

    dense: tuple[tuple[int, int, int, int], ...]  # (request, first token, end token, keys seen)
    rows: torch.Tensor  # [T] int64 tokens that do not see everything
    requests: torch.Tensor  # [T] int64 of these tokens
    lists: torch.Tensor  # [T] int64 rows of what these tokens choose
    positions: torch.Tensor  # [T] int64 of these tokens
    group: TileGroup | None
    scoring: TokenScoring | None


def plan_decodes(batch: PagedBatch, rule: SelectionPolicy, page_size: int) -> DecodePlan:
    """Index tensors of the decodes under a per-token ``rule``, made once for all layers."""
    key = ("decodes", rule, page_size)
    return batch.derived(key, lambda: _plan_decodes(batch, rule, page_size))


def _plan_decodes(batch: PagedBatch, rule: SelectionPolicy, page_size: int) -> DecodePlan:
    lengths, counts = host_lengths(batch)
    dense, rows, requests, positions, deciding = [], [], [], [], []
    token = 0
    for request in range(batch.num_decodes):
        count, length = counts[request], lengths[request]
        start = length - count
        if count and rule.sees_all(start if rule.alignment else length - 1):
            dense.append((request, token, token + count, length))
            token += count
            continue
        for offset in range(count):
            position = start + offset
            decides = start if rule.alignment else position
            if rule.sees_all(decides):
                dense.append((request, token + offset, token + offset + 1, position + 1))
            else:
                rows.append(token + offset)
                requests.append(request)
                positions.append(position)
                deciding.append(decides)
        token += count
    if not rows:
        none = torch.empty(0, dtype=torch.long)
        return DecodePlan(tuple(dense), none, none, none, none, None, None)
    where, which = torch.tensor(positions), torch.tensor(requests)
    table = batch.pages(page_size).index_select(0, which)
    lens = batch.seq_lens.index_select(0, which).long()
    group = make_tile_group(table, where, 1, lens, rule, torch.tensor(deciding))
    tokens = torch.tensor(rows)
    return DecodePlan(
        dense=tuple(dense),
        rows=tokens,
        requests=which,
        lists=which if rule.alignment else tokens,
        positions=where,
        group=group,
        scoring=plan_tokens(table, where, rule) if rule.selects_blocks else None,
    )


@dataclass(frozen=True)
class PrefillPlan:
    """One request's prefill: a dense head, then tile-aligned queries that select or slide."""

    dense_end: int  # first query position that does not see everything
    tile: int
    groups: tuple[tuple[int, int, TileGroup], ...]  # (position of the first tile, tiles, group)
    table: torch.Tensor  # [1, W] int64 page table row


def plan_prefill(
    batch: PagedBatch, request: int, policy: SelectionPolicy, k_cache: torch.Tensor
) -> PrefillPlan:
    """Index tensors of the prefill of ``request`` in groups of tiles, made once for all layers.

    Args:
        k_cache: ``[num_pages, Hkv, page_size, D]``, whose sizes bound a group.
    """
    _, heads, page_size, dim = k_cache.shape
    blocks = policy.deepest_budget + 1
    blocks += policy.listed_blocks if policy.selects_blocks else 0
    most = max(_GATHER_ELEMENTS // (heads * dim * blocks * policy.sel_block_size), 1)
    key = ("prefill", request, policy, most, page_size)
    return batch.derived(key, lambda: _plan_prefill(batch, request, policy, most, page_size))


def _plan_prefill(
    batch: PagedBatch, request: int, policy: SelectionPolicy, group_tiles: int, page_size: int
) -> PrefillPlan:
    lengths, counts = host_lengths(batch)
    length = lengths[request]
    low = first_sparse(policy, length - counts[request], length)
    tile = policy.query_tile if policy.selects_blocks else 2 * policy.sel_block_size
    table = batch.pages(page_size)[request : request + 1]
    groups = []
    start = low - low % tile if low < length else length
    while start < length:
        count = min(group_tiles, ceil_div(length - start, tile))
        rule = policy.at(start)
        while policy.at(start + (count - 1) * tile) != rule:  # tiles of a group choose as many
            count -= 1
        firsts = start + tile * torch.arange(count)
        lens = torch.full((count,), length)
        groups.append((start, count, make_tile_group(table, firsts, tile, lens, rule)))
        start += count * tile
    return PrefillPlan(low, tile, tuple(groups), table)

"""Paged attention in plain torch: gathered blocks and SDPA, no loop over tokens.

This is the CPU path, and what any device without a Triton kernel can run.  Decoded tokens are
handled together, whatever their sequences; a prefill is handled in groups of query tiles.  Index
tensors that depend on the batch alone are built once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sparsek_kernels.paged import native_decode
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.eager_select import (
    SummaryIndex,
    TokenScoring,
    plan_tokens,
    select_tiles,
    select_tokens,
)
from sparsek_kernels.paged.gather import (
    RunReader,
    block_reader,
    join_kv,
    locate_blocks,
    pick_blocks,
    read_sequence,
)
from sparsek_kernels.paged.plan import first_sparse
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

_GATHER_ELEMENTS = 1 << 22
"""Elements of K that one group of tiles may gather: bounds scratch, keeps it near the caches."""
_DENSE_ROWS = 512
"""Queries that a dense prefill with a prefix handles at once: bounds its mask."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """SDPA over gathered keys, with learned sinks as one more key of value zero.

    Args:
        q: ``[T, Hkv, G, Q, D]``; k, v: ``[T, Hkv, n, D]``.
        bias: additive, broadcastable to ``[T, 1, Q, n]``, or ``None``.
        sinks: ``[Hq]`` logits, or ``None``.

    Returns:
        ``[T, Hkv, G, Q, Dv]``.
    """
    tiles, heads, group, rows, dim = q.shape
    if bias is not None:
        bias = bias.to(q.dtype)
        if rows > 1 and bias.shape[-2] > 1:
            bias = bias.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)
    if sinks is not None:
        k = torch.cat([k, k.new_zeros(*k.shape[:2], 1, k.shape[3])], dim=2)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], dim=2)
        column = sinks.to(q.dtype).view(1, heads, group, 1, 1)
        column = column.expand(-1, -1, -1, rows, -1).reshape(1, heads, group * rows, 1)
        keys = q.new_zeros(1) if bias is None else bias
        keys = keys.expand(tiles, heads, group * rows, k.shape[2] - 1)
        bias = torch.cat([keys, column.expand(tiles, -1, -1, -1)], dim=-1)
    flat = q.reshape(tiles, heads, group * rows, dim)
    out = F.scaled_dot_product_attention(flat, k, v, attn_mask=bias, scale=softmax_scale)
    return out.view(tiles, heads, group, rows, v.shape[-1])


@dataclass(frozen=True)
class TileGroup:
    """Tiles that attend equally many blocks: selected ones, then sinks, then local ones.

    Args:
        table: ``[1 or T, W]`` int64 page table rows.
        forced: ``[T, 1, sinks + locals]`` int64 blocks.
        num_keys: keys of a tile, up to the last one that any query sees.
        bias: ``[1 or T, 1, Q, num_keys]``, 0 or -inf, over the keys in the order above; ``None``
            where every query sees them all.
        stale: ``[T, 1, last keys, 1]`` bool, keys past the sequence's end; or ``None``.
        num_blocks: blocks of the longest sequence.
    """

    table: torch.Tensor
    forced: torch.Tensor
    num_keys: int
    bias: torch.Tensor | None
    stale: torch.Tensor | None
    num_blocks: int
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
) -> TileGroup:
    """Index tensors for ``T`` tiles of ``rows`` queries that do not see everything.

    Args:
        table: ``[1 or T, W]``; first_position: ``[T]`` position of each tile's first query;
        seq_lens: ``[T]``.
    """
    size = policy.sel_block_size
    window = policy.window_size or 1
    tiles = first_position.shape[0]
    if policy.selects_blocks:
        first_local, _ = policy.local_range(first_position)
        span = policy.local_blocks
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


def attend_tiles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: TileGroup,
    selected: torch.Tensor | None,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of tiles over their selected, sink and local blocks.

    Args:
        q: ``[T, Hkv, G, Q, D]``.
        selected: ``[T, Hkv, scored_blocks]`` int64, or ``None``.
    """
    size = policy.sel_block_size
    joined = join_kv(k_cache, v_cache)
    gathered = []
    for cache in (k_cache, v_cache) if joined is None else (joined,):
        reader = block_reader(cache, size)
        rows = reader.read(group.names(reader, selected, size)).flatten(2, 3)
        rows = rows[:, :, : group.num_keys]
        if group.stale is not None:
            rows[:, :, -group.stale.shape[2] :].masked_fill_(group.stale, 0.0)
        gathered.append(rows)
    k, v = gathered if joined is None else gathered[0].chunk(2, dim=-1)
    return attend(q, k, v, group.bias_as(q.dtype), softmax_scale, sinks)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last ``n`` queries of a sequence over all of it.

    Args:
        q: ``[n, Hkv, G, D]``; k, v: ``[Hkv, N, D]`` with ``N >= n``.

    Returns:
        ``[n, Hkv, G, Dv]``.
    """
    count, heads, group, dim = q.shape
    length = k.shape[1]
    if count == length and sinks is None:
        out = F.scaled_dot_product_attention(
            q.view(count, heads * group, dim).transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=group > 1,
        )
        return out[0].transpose(0, 1).reshape(count, heads, group, -1)
    parts = []
    for begin in range(0, count, _DENSE_ROWS):
        end = min(begin + _DENSE_ROWS, count)
        keys = length - count + end
        bias = None
        if end - begin > 1:
            future = torch.ones(end - begin, keys, dtype=torch.bool).triu_(keys - end + begin + 1)
            bias = torch.zeros(future.shape).masked_fill_(future, float("-inf"))[None, None]
        rows = q[begin:end].permute(1, 2, 0, 3).unsqueeze(0)
        out = attend(rows, k[None, :, :keys], v[None, :, :keys], bias, softmax_scale, sinks)
        parts.append(out[0].permute(2, 0, 1, 3))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    joined = join_kv(k_cache, v_cache)
    if joined is None:
        return read_sequence(k_cache, pages, length), read_sequence(v_cache, pages, length)
    k, v = read_sequence(joined, pages, length).chunk(2, dim=-1)
    return k, v


@dataclass(frozen=True)
class DecodePlan:
    """Decoded tokens of a step: those that see everything, and those that do not."""

    dense: tuple[tuple[int, int, int, int], ...]  # (request, first token, end token, keys seen)
    rows: torch.Tensor  # [T] int64 tokens that do not see everything
    group: TileGroup | None
    scoring: TokenScoring | None


def plan_decodes(batch: PagedBatch, rule: SelectionPolicy, page_size: int) -> DecodePlan:
    """Index tensors of the decodes under a per-token ``rule``."""
    lengths, counts = host_lengths(batch)
    dense, rows, requests, positions = [], [], [], []
    token = 0
    for request in range(batch.num_decodes):
        count, length = counts[request], lengths[request]
        if count and rule.sees_all(length - 1):
            dense.append((request, token, token + count, length))
            token += count
            continue
        for offset in range(count):
            position = length - count + offset
            if rule.sees_all(position):
                dense.append((request, token + offset, token + offset + 1, position + 1))
            else:
                rows.append(token + offset)
                requests.append(request)
                positions.append(position)
        token += count
    if not rows:
        return DecodePlan(tuple(dense), torch.empty(0, dtype=torch.long), None, None)
    where, which = torch.tensor(positions), torch.tensor(requests)
    table = batch.pages(page_size).index_select(0, which)
    return DecodePlan(
        dense=tuple(dense),
        rows=torch.tensor(rows),
        group=make_tile_group(table, where, 1, batch.seq_lens.index_select(0, which).long(), rule),
        scoring=plan_tokens(table, where, rule) if rule.selects_blocks else None,
    )


@dataclass(frozen=True)
class PrefillPlan:
    """One request's prefill: a dense head, then tile-aligned queries that select or slide."""

    dense_end: int  # first query position that does not see everything
    tile: int
    groups: tuple[tuple[int, int, TileGroup], ...]  # (position of the first tile, tiles, group)
    summaries: SummaryIndex


def plan_prefill(
    batch: PagedBatch, request: int, policy: SelectionPolicy, group_tiles: int, page_size: int
) -> PrefillPlan:
    """Index tensors of the prefill of ``request`` in groups of at most ``group_tiles`` tiles."""
    lengths, counts = host_lengths(batch)
    length = lengths[request]
    low = first_sparse(policy, length - counts[request], length)
    tile = policy.query_tile if policy.selects_blocks else 2 * policy.sel_block_size
    table = batch.pages(page_size)[request : request + 1]
    groups = []
    start = low - low % tile if low < length else length
    while start < length:
        count = min(group_tiles, ceil_div(length - start, tile))
        firsts = start + tile * torch.arange(count)
        lens = torch.full((count,), length)
        groups.append((start, count, make_tile_group(table, firsts, tile, lens, policy)))
        start += count * tile
    blocks = (length - 1) // policy.sel_block_size
    return PrefillPlan(low, tile, tuple(groups), SummaryIndex(table, blocks))


@dataclass(frozen=True)
class PagedOperands:
    """The tensors of one layer's call."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_summary: torch.Tensor | None
    sinks: torch.Tensor | None
    softmax_scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0


def paged_attention_eager(
    q: torch.Tensor,
    operands: PagedOperands,
    batch: PagedBatch,
    policy: SelectionPolicy,
    out: torch.Tensor,
) -> None:
    """Torch form of :func:`sparsek_kernels.paged.paged_attention`; writes ``out``."""
    heads = operands.k_cache.shape[1]
    grouped = q.unflatten(1, (heads, -1))
    result = out.unflatten(1, (heads, -1))
    if batch.num_decodes and native_decode.supports(
        q, operands.k_cache, operands.v_cache, operands.k_summary, batch.block_table
    ):
        native_decode.decode(
            q[: batch.num_decode_tokens],
            operands.k_cache,
            operands.v_cache,
            operands.k_summary,
            batch,
            policy.per_token(),
            operands.softmax_scale,
            operands.sinks,
            out[: batch.num_decode_tokens],
        )
    elif batch.num_decodes:
        _decode(grouped, operands, batch, policy.per_token(), result)
    _, counts = host_lengths(batch)
    token = int(batch.cu_seqlens_q[batch.num_decodes])
    for request in range(batch.num_decodes, batch.num_requests):
        part = slice(token, token + counts[request])
        if counts[request]:
            _prefill(grouped[part], operands, batch, request, policy, result[part])
        token = part.stop


def _decode(
    q: torch.Tensor,
    operands: PagedOperands,
    batch: PagedBatch,
    rule: SelectionPolicy,
    out: torch.Tensor,
) -> None:
    scale, sinks = operands.softmax_scale, operands.sinks
    page_size = operands.k_cache.shape[2]
    plan = batch.derived(("decode", rule, page_size), lambda: plan_decodes(batch, rule, page_size))
    for request, begin, end, length in plan.dense:
        pages = batch.block_table[request].long()
        k, v = _read_kv(operands.k_cache, operands.v_cache, pages, length)
        out[begin:end] = attend_dense(q[begin:end], k, v, scale, sinks)
    if plan.group is None:
        return
    every = plan.rows.numel() == q.shape[0]
    rows = q if every else q.index_select(0, plan.rows)
    selected = None
    if plan.scoring is not None and operands.k_summary is not None:
        selected = select_tokens(rows, operands.k_summary, plan.scoring, rule, scale)
    attended = attend_tiles(
        rows.unsqueeze(3),
        operands.k_cache,
        operands.v_cache,
        plan.group,
        selected,
        rule,
        scale,
        sinks,
    ).squeeze(3)
    if every:
        out.copy_(attended)
    else:
        out[plan.rows] = attended


def _prefill(
    q: torch.Tensor,
    operands: PagedOperands,
    batch: PagedBatch,
    request: int,
    policy: SelectionPolicy,
    out: torch.Tensor,
) -> None:
    k_cache, v_cache = operands.k_cache, operands.v_cache
    scale, sinks = operands.softmax_scale, operands.sinks
    _, heads, page_size, dim = k_cache.shape
    per_tile = heads * dim * (policy.budget_blocks + 1) * policy.sel_block_size
    group_tiles = max(_GATHER_ELEMENTS // per_tile, 1)
    plan = batch.derived(
        ("prefill", request, policy, group_tiles, page_size),
        lambda: plan_prefill(batch, request, policy, group_tiles, page_size),
    )
    lengths, _ = host_lengths(batch)
    length = lengths[request]
    start = length - q.shape[0]
    if plan.dense_end > start:
        count = plan.dense_end - start
        pages = batch.block_table[request].long()
        k, v = _read_kv(k_cache, v_cache, pages, plan.dense_end)
        out[:count] = attend_dense(q[:count], k, v, scale, sinks)
    for first, tiles, group in plan.groups:
        begin = max(first, plan.dense_end, start)
        end = min(first + tiles * plan.tile, length)
        rows = q[begin - start : end - start]
        selected = None
        if policy.selects_blocks and operands.k_summary is not None:
            selected = select_tiles(rows, begin, operands.k_summary, plan.summaries, policy, scale)
        padded = q.new_zeros(tiles * plan.tile, *q.shape[1:])
        padded[begin - first : end - first] = rows
        padded = padded.unflatten(0, (tiles, plan.tile)).permute(0, 2, 3, 1, 4)
        attended = attend_tiles(padded, k_cache, v_cache, group, selected, policy, scale, sinks)
        attended = attended.permute(0, 3, 1, 2, 4).flatten(0, 1)
        out[begin - start : end - start] = attended[begin - first : end - first]

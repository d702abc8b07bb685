"""Paged attention in plain torch: gathered blocks and SDPA, no loop over tokens.

This is the CPU path, and what any device without a Triton kernel can run.  Decoded tokens are
handled together, whatever their sequences; a prefill is handled in groups of query tiles.  Index
tensors that depend on the batch alone are built once per step and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from .batch import PagedBatch
from .gather import join_kv, read_blocks, read_sequence, read_summaries
from .policy import CELL_SIZE, SelectionPolicy, ceil_div

_GATHER_ELEMENTS = 1 << 22
"""Elements of K that one group of tiles may gather: bounds scratch, keeps it near the caches."""
_QUERY_ROWS = 512
"""Queries that a dense prefill or a scoring pass handles at once."""


def write_kv_eager(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    score_kind: str,
) -> None:
    """Torch form of :func:`sparsek_kernels.paged.write_kv`."""
    page_size = k_cache.shape[2]
    slots = slot_mapping[: key.shape[0]]
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, key, value = slots[keep], key[keep], value[keep]
    if slots.numel() == 0:
        return
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, offsets] = key.to(k_cache.dtype)
    v_cache[pages, :, offsets] = value.to(v_cache.dtype)
    if k_summary is None:
        return
    cell_size = CELL_SIZE if score_kind == "cell_mean" else 2 * CELL_SIZE
    cells, which = torch.unique(slots // cell_size, return_inverse=True)
    filled = torch.zeros_like(cells).scatter_reduce_(0, which, slots % cell_size + 1, "amax")
    per_page = page_size // cell_size
    cell_pages, cell_index = cells // per_page, cells % per_page
    rows = k_cache.unflatten(2, (per_page, cell_size))[cell_pages, :, cell_index].float()
    written = (torch.arange(cell_size) < filled[:, None])[:, None, :, None]
    if score_kind == "cell_mean":
        total = rows.masked_fill_(~written, 0.0).sum(2)
        k_summary[cell_pages, :, cell_index] = (total / filled[:, None, None]).to(k_summary.dtype)
        return
    low = rows.masked_fill(~written, float("inf")).amin(2)
    high = rows.masked_fill(~written, float("-inf")).amax(2)
    k_summary[cell_pages, :, 2 * cell_index] = low.to(k_summary.dtype)
    k_summary[cell_pages, :, 2 * cell_index + 1] = high.to(k_summary.dtype)


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


def block_logits(
    q: torch.Tensor, summaries: torch.Tensor, policy: SelectionPolicy, softmax_scale: float
) -> torch.Tensor:
    """q: ``[R, Hkv, M, D]`` float32; summaries: ``[R, Hkv, c, D]``; ``[R, Hkv, M, blocks]``."""
    if policy.score_kind == "cell_mean":
        logits = torch.matmul(q, summaries.mT)
        cell_size = CELL_SIZE
    else:
        low, high = summaries[:, :, 0::2], summaries[:, :, 1::2]
        logits = torch.matmul(q.clamp(max=0.0), low.mT) + torch.matmul(q.clamp(min=0.0), high.mT)
        cell_size = 2 * CELL_SIZE
    per_block = policy.sel_block_size // cell_size
    return logits.unflatten(-1, (-1, per_block)).amax(-1).mul_(softmax_scale)


def top_blocks(scores: torch.Tensor, first: int, last: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best candidates, ascending; ties go to the lower index.

    Args:
        scores: ``[T, Hkv, blocks]`` (overwritten); candidates of tile t: ``[first, last[t])``.
    """
    index = torch.arange(scores.shape[-1])
    outside = (index < first) | (index >= last[:, None])
    scores.masked_fill_(outside[:, None], float("-inf"))
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return ranked[..., :count].sort(dim=-1).values


@dataclass(frozen=True)
class TileGroup:
    """Tiles with equally many blocks to attend; index tensors only."""

    table: torch.Tensor  # [T, W] int64
    forced: torch.Tensor  # [T, sinks + locals] int64, sink blocks first
    num_sink_blocks: int
    bias: torch.Tensor  # [T or 1, 1, Q, n] over sink, selected, local columns
    stale: torch.Tensor | None  # [T, last columns] bool: keys past the sequence's end


def make_tile_group(
    table: torch.Tensor,
    first_position: torch.Tensor,
    rows: int,
    seq_lens: torch.Tensor,
    policy: SelectionPolicy,
) -> TileGroup:
    """Index tensors for ``T`` tiles of ``rows`` queries that do not see everything.

    Args:
        table: ``[T, W]``; first_position: ``[T]`` position of each tile's first query;
        seq_lens: ``[T]``.
    """
    size = policy.sel_block_size
    window = policy.window_size or 1
    if policy.selects_blocks:
        tile_start = first_position - first_position % policy.query_tile
        first_local = (tile_start // size - policy.reach_blocks).clamp_(min=0)
        span = policy.reach_blocks + max(ceil_div(policy.query_tile, size), 1)
    else:
        first_local = (first_position - window + 1).clamp_(min=0) // size
        span = ceil_div(window + rows - 2, size) + 1
    sink_columns = torch.arange(policy.sink_blocks).expand(table.shape[0], -1)
    local = first_local[:, None] + torch.arange(span)
    query = (first_position[:, None] + torch.arange(rows))[:, :, None]
    within = torch.arange(size)
    key_local = (local[:, :, None] * size + within).flatten(1)[:, None, :]
    seen_local = key_local <= query
    sink_tokens = policy.sink_blocks * size
    if policy.selects_blocks:
        seen_sink = torch.ones(1, 1, sink_tokens + policy.scored_blocks * size, dtype=torch.bool)
    else:
        key_sink = torch.arange(sink_tokens)
        seen_sink = (key_sink < policy.num_sink)[None, None, :]
        seen_local = seen_local & (key_local > query - window) & (key_local >= policy.num_sink)
    seen = torch.cat([seen_sink.expand(*seen_local.shape[:2], -1), seen_local], dim=-1)
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    if bias.shape[0] > 1 and bool((bias == bias[:1]).all()):
        bias = bias[:1]
    key_local = key_local[:, 0, :]
    key_other = torch.zeros(1, seen.shape[-1] - key_local.shape[1], dtype=torch.long)
    if not policy.selects_blocks:  # otherwise the sink blocks are complete
        key_other[0] = torch.arange(sink_tokens)
    keys = torch.cat([key_other.expand(table.shape[0], -1), key_local], dim=1)
    stale = keys >= seq_lens[:, None]
    stale_columns = stale.any(0).nonzero()
    return TileGroup(
        table=table,
        forced=torch.cat([sink_columns, local], dim=1),
        num_sink_blocks=policy.sink_blocks,
        bias=bias.unsqueeze(1),
        stale=stale[:, int(stale_columns[0]) :] if stale_columns.numel() else None,
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
    """Attention of tiles over their sink, selected and local blocks.

    Args:
        q: ``[T, Hkv, G, Q, D]``.
        selected: ``[T, Hkv, scored_blocks]`` int64, or ``None``.
    """
    heads = q.shape[1]
    forced = group.forced.unsqueeze(1).expand(-1, heads, -1)
    if selected is None:
        blocks = forced
    else:
        cut = group.num_sink_blocks
        blocks = torch.cat([forced[..., :cut], selected, forced[..., cut:]], dim=-1)
    joined = join_kv(k_cache, v_cache)
    caches = (joined,) if joined is not None else (k_cache, v_cache)
    gathered = [read_blocks(cache, group.table, blocks, policy.sel_block_size) for cache in caches]
    if group.stale is not None:
        columns = group.stale.shape[1]
        for rows in gathered:
            rows[:, :, -columns:].masked_fill_(group.stale[:, None, :, None], 0.0)
    if joined is not None:
        k, v = gathered[0].chunk(2, dim=-1)
    else:
        k, v = gathered
    return attend(q, k, v, group.bias, softmax_scale, sinks)


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
        return out[0].transpose(0, 1).unflatten(1, (heads, group))
    parts = []
    for begin in range(0, count, _QUERY_ROWS):
        end = min(begin + _QUERY_ROWS, count)
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
    """Decoded tokens of a step: those that see everything, and those that select."""

    dense: tuple[tuple[int, int, int, int], ...]  # (request, first token, end token, keys seen)
    rows: torch.Tensor  # [T] int64 tokens that do not see everything
    group: TileGroup | None
    own_block: torch.Tensor  # [T]
    last_candidate: torch.Tensor  # [T]
    num_blocks: int  # complete blocks that any of them scores


def plan_decodes(batch: PagedBatch, rule: SelectionPolicy) -> DecodePlan:
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
    position = torch.tensor(positions, dtype=torch.long)
    group = None
    if rows:
        which = torch.tensor(requests)
        group = make_tile_group(
            batch.block_table.index_select(0, which).long(),
            position,
            1,
            batch.seq_lens.index_select(0, which).long(),
            rule,
        )
    own_block = position // rule.sel_block_size
    return DecodePlan(
        dense=tuple(dense),
        rows=torch.tensor(rows, dtype=torch.long),
        group=group,
        own_block=own_block,
        last_candidate=(own_block - rule.reach_blocks).clamp_(min=0),
        num_blocks=int(own_block.max()) if rows else 0,
    )


def host_lengths(batch: PagedBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sequence and query lengths as integers (on the CPU they are there already)."""

    def read() -> tuple[tuple[int, ...], tuple[int, ...]]:
        starts = batch.cu_seqlens_q.tolist()
        counts = tuple(b - a for a, b in pairwise(starts))
        return tuple(batch.seq_lens.tolist()), counts

    if batch.seq_lens_host is not None and batch.query_lens_host is not None:
        return batch.seq_lens_host, batch.query_lens_host
    return batch.derived("host lengths", read)


def select_decodes(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    plan: DecodePlan,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks chosen for the selecting tokens of ``plan``.

    Args:
        q: ``[T, Hkv, G, D]``.

    Returns:
        ``[T, Hkv, scored_blocks]`` int64, ascending.
    """
    if plan.group is None:
        raise ValueError("plan: expected at least one selecting token, got none")
    vectors = plan.num_blocks * rule.sel_block_size // CELL_SIZE
    summaries = read_summaries(k_summary, plan.group.table, vectors)
    logits = block_logits(q.float(), summaries, rule, softmax_scale)
    own = plan.own_block[:, None, None, None]
    logits.masked_fill_(torch.arange(plan.num_blocks) >= own, float("-inf"))
    scores = torch.softmax(logits, dim=-1).sum(2)
    return top_blocks(scores, rule.sink_blocks, plan.last_candidate, rule.scored_blocks)


@dataclass(frozen=True)
class PrefillPlan:
    """One request's prefill: a dense head, then tile-aligned queries that select or slide."""

    dense_end: int  # first query position that does not see everything
    tile: int
    groups: tuple[tuple[int, TileGroup], ...]  # (position of the group's first tile, tiles)


def plan_prefill(
    batch: PagedBatch, request: int, policy: SelectionPolicy, group_tiles: int
) -> PrefillPlan:
    """Index tensors of the prefill of ``request`` in groups of at most ``group_tiles`` tiles."""
    lengths, counts = host_lengths(batch)
    length = lengths[request]
    position = length - counts[request]
    low, high = position, length
    while low < high:  # sees_all never becomes true again once it is false
        middle = (low + high) // 2
        low, high = (middle + 1, high) if policy.sees_all(middle) else (low, middle)
    tile = policy.query_tile if policy.selects_blocks else 2 * policy.sel_block_size
    table = batch.block_table[request : request + 1].long()
    groups = []
    start = low - low % tile if low < length else length
    while start < length:
        count = min(group_tiles, ceil_div(length - start, tile))
        firsts = start + tile * torch.arange(count)
        lens = torch.full((count,), length)
        groups.append((start, make_tile_group(table.expand(count, -1), firsts, tile, lens, policy)))
        start += count * tile
    return PrefillPlan(dense_end=low, tile=tile, groups=tuple(groups))


def select_prefill(
    q: torch.Tensor,
    position: int,
    k_summary: torch.Tensor,
    pages: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Blocks chosen for consecutive tiles.

    Args:
        q: ``[n, Hkv, G, D]``, queries from ``position`` on.
        pages: ``[1, W]`` int64.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64 for the tiles that hold the queries.
    """
    count, heads, group, _ = q.shape
    tile, size = policy.query_tile, policy.sel_block_size
    blocks = (position + count - 1) // size
    summaries = read_summaries(k_summary, pages, blocks * size // CELL_SIZE)
    first_tile = position // tile
    tiles = (position + count - 1) // tile - first_tile + 1
    scores = torch.zeros(tiles, heads, blocks)
    for begin in range(0, count, _QUERY_ROWS):
        rows = q[begin : begin + _QUERY_ROWS].float()
        where = position + begin + torch.arange(rows.shape[0])
        flat = rows.permute(1, 2, 0, 3).reshape(1, heads, -1, rows.shape[-1])
        logits = block_logits(flat, summaries, policy, softmax_scale)
        logits = logits.view(heads, group, rows.shape[0], blocks)
        future = torch.arange(blocks) >= (where // size)[:, None]
        probs = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1).sum(1)
        scores.index_add_(0, where // tile - first_tile, probs.transpose(0, 1))
    starts = (first_tile + torch.arange(tiles)) * tile
    last = (starts // size - policy.reach_blocks).clamp_(min=0)
    return top_blocks(scores, policy.sink_blocks, last, policy.scored_blocks)


def paged_attention_eager(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    softmax_scale: float,
    k_summary: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Torch form of :func:`sparsek_kernels.paged.paged_attention`; writes ``out``."""
    heads = k_cache.shape[1]
    grouped = q.unflatten(1, (heads, -1))
    result = out.unflatten(1, (heads, -1))
    if batch.num_decodes:
        _decode(
            grouped,
            k_cache,
            v_cache,
            batch,
            policy.per_token(),
            softmax_scale,
            k_summary,
            sinks,
            result,
        )
    lengths, counts = host_lengths(batch)
    token = sum(counts[: batch.num_decodes])
    for request in range(batch.num_decodes, batch.num_requests):
        count = counts[request]
        if count:
            _prefill(
                grouped[token : token + count],
                k_cache,
                v_cache,
                batch,
                request,
                lengths[request],
                policy,
                softmax_scale,
                k_summary,
                sinks,
                result[token : token + count],
            )
        token += count


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    rule: SelectionPolicy,
    softmax_scale: float,
    k_summary: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    plan = batch.derived(("decode", rule), lambda: plan_decodes(batch, rule))
    for request, begin, end, length in plan.dense:
        pages = batch.block_table[request].long()
        k, v = _read_kv(k_cache, v_cache, pages, length)
        out[begin:end] = attend_dense(q[begin:end], k, v, softmax_scale, sinks)
    if plan.group is None:
        return
    rows = q if plan.rows.numel() == q.shape[0] else q.index_select(0, plan.rows)
    selected = None
    if rule.selects_blocks and k_summary is not None:
        selected = select_decodes(rows, k_summary, plan, rule, softmax_scale)
    attended = attend_tiles(
        rows.unsqueeze(3), k_cache, v_cache, plan.group, selected, rule, softmax_scale, sinks
    )
    out[plan.rows] = attended.squeeze(3)


def _prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    request: int,
    length: int,
    policy: SelectionPolicy,
    softmax_scale: float,
    k_summary: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    heads, dim = k_cache.shape[1], k_cache.shape[-1]
    per_tile = heads * dim * (policy.budget_blocks + 1) * policy.sel_block_size
    group_tiles = max(_GATHER_ELEMENTS // per_tile, 1)
    plan = batch.derived(
        ("prefill", request, policy, group_tiles),
        lambda: plan_prefill(batch, request, policy, group_tiles),
    )
    pages = batch.block_table[request : request + 1].long()
    start = length - q.shape[0]
    if plan.dense_end > start:
        count = plan.dense_end - start
        k, v = _read_kv(k_cache, v_cache, pages[0], plan.dense_end)
        out[:count] = attend_dense(q[:count], k, v, softmax_scale, sinks)
    tile = plan.tile
    for first, group in plan.groups:
        tiles = group.table.shape[0]
        begin = max(first, plan.dense_end, start)
        end = min(first + tiles * tile, length)
        rows = q[begin - start : end - start]
        selected = None
        if policy.selects_blocks and k_summary is not None:
            selected = select_prefill(rows, begin, k_summary, pages, policy, softmax_scale)
        padded = q.new_zeros(tiles * tile, *q.shape[1:])
        padded[begin - first : end - first] = rows
        padded = padded.unflatten(0, (tiles, tile)).permute(0, 2, 3, 1, 4)
        attended = attend_tiles(
            padded, k_cache, v_cache, group, selected, policy, softmax_scale, sinks
        )
        attended = attended.permute(0, 3, 1, 2, 4).flatten(0, 1)
        out[begin - start : end - start] = attended[begin - first : end - first]

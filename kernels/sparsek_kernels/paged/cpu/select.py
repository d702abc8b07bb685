"""Torch form of block selection: by summaries, and for tiles then by exact masses."""

from __future__ import annotations

import itertools

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.checks import given_summary
from sparsek_kernels.paged.cpu.gather import block_reader, read_sequence
from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.infllm import infllm_scores, semantic_kernels, unrotated
from sparsek_kernels.paged.cpu.plan import (
    DecodePlan,
    PrefillPlan,
    TileGroup,
    TokenScoring,
    not_competing,
    plan_decodes,
    plan_prefill,
    plan_tokens,
)
from sparsek_kernels.paged.cpu.seer import gate_queries, gate_scores
from sparsek_kernels.paged.lists import listed_blocks
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, ceil_div
from sparsek_kernels.paged.seer.gates import Gates, given_gates
from sparsek_kernels.paged.sketch import VECTOR_SIZE, rotate

NOTHING = 1 << 40
"""In a list of candidates, a place that has none: a block past the end of every sequence."""

_QUERY_ROWS = 512
"""Queries that one pass scores by means: bounds its [queries, cells] scratch."""
_GATHER_ELEMENTS = 1 << 22
"""Elements of K that one group of tiles may gather: bounds scratch, keeps it near the caches."""


def group_tiles(policy: SelectionPolicy, heads: int, dim: int) -> int:
    """Tiles of a prefill that are selected for and attended at once."""
    blocks = policy.budget_blocks + 1 + (policy.listed_blocks if policy.selects_blocks else 0)
    return max(_GATHER_ELEMENTS // (heads * dim * blocks * policy.sel_block_size), 1)


def list_best(scores: torch.Tensor, outside: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best blocks, ascending; ties go to the lower index.

    Args:
        scores: ``[T, Hkv, blocks]``, not negative, overwritten.
        outside: ``[T, 1, blocks]`` bool, blocks that do not compete.

    Returns:
        ``[T, Hkv, at most count]`` int64; :data:`NOTHING` where there are fewer.
    """
    scores.masked_fill_(outside, -1.0)
    ranked, blocks = torch.sort(scores, dim=-1, descending=True, stable=True)
    ranked, blocks = ranked[..., :count], blocks[..., :count]
    return blocks.masked_fill_(ranked < 0.0, NOTHING).sort(dim=-1).values


def token_blocks(
    q: torch.Tensor,
    k_summary: torch.Tensor,
    page_size: int,
    plan: TokenScoring,
    rule: SelectionPolicy,
    softmax_scale: float,
    here: HeldPages | None,
) -> torch.Tensor:
    """Blocks of single tokens by the sketch.

    q: ``[T, Hkv, G, D]``; returns ``[T, Hkv, scored_blocks]`` int64, ascending.
    """
    vectors = plan.index.read(k_summary, page_size, q.shape[-1], rule.sel_block_size)
    logits = torch.matmul(rotate(q.float()) * softmax_scale, vectors.mT)
    logits = logits.unflatten(-1, (-1, rule.sel_block_size // VECTOR_SIZE)).amax(-1)
    if here is not None:
        blocks = torch.arange(logits.shape[-1]).expand(*logits.shape[:2], -1)
        logits = here.complete(logits, blocks, rule.sel_block_size)
    if plan.future is not None:
        logits.masked_fill_(plan.future, float("-inf"))  # blocks past the end may hold NaN
    scores = torch.softmax(logits, dim=-1).sum(2)
    return list_best(scores, plan.outside, rule.scored_blocks)


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
    """The candidates with the largest exact mass of a single sample.

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
        shares = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1).sum(1)
        given[tile, head] = shares.unflatten(-1, (-1, size)).sum(-1)[:, : listed.shape[-1]]
    given.nan_to_num_(0.0)  # of no query: nothing
    scores = given.amax(2).masked_fill_(listed == NOTHING, -1.0)
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return listed.gather(-1, best[..., : rule.scored_blocks]).sort(dim=-1).values


def select_tokens(
    q: torch.Tensor,
    where: torch.Tensor,
    k_cache: torch.Tensor,
    k_summary: torch.Tensor,
    plan: TokenScoring,
    group: TileGroup,
    rule: SelectionPolicy,
    softmax_scale: float,
    here: HeldPages | None = None,
    gates: Gates | None = None,
) -> torch.Tensor:
    """Blocks of single tokens.

    Args:
        q: ``[T, Hkv, G, D]`` at the positions ``where`` ``[T]``.
        here: the pages that this rank holds, where it does not hold them all.

    Returns:
        ``[T, Hkv, scored_blocks]`` int64, ascending.
    """
    if rule.ranking == "infllm":
        blocks = plan.index.num_blocks
        q = unrotated(q, group.rotation, where)
        scores = []
        for token, table in enumerate(plan.index.table):
            kernels = semantic_kernels(k_cache, table, blocks + 1, rule, group.rotation)
            one = slice(token, token + 1)
            scores.append(infllm_scores(q[one], where[one], kernels, blocks, rule, softmax_scale))
        return list_best(torch.cat(scores), plan.outside, rule.scored_blocks)
    if rule.ranking == "seer":
        page_size = k_cache.shape[2]
        gates = given_gates(gates)
        queries = gate_queries(q, where, gates, group.rotation)
        found = gate_scores(queries, k_summary, page_size, plan.index, rule, plan.future)
        return list_best(found, plan.outside, rule.scored_blocks)
    return token_blocks(q, k_summary, k_cache.shape[2], plan, rule, softmax_scale, here)


def select_decodes(
    q: torch.Tensor,
    operands: PagedOperands,
    plan: DecodePlan,
    rule: SelectionPolicy,
    here: HeldPages | None = None,
) -> torch.Tensor | None:
    """Blocks of the plan's decoded tokens, or ``None`` where the rule selects none.

    Args:
        q: ``[T, Hkv, G, D]``, the queries of ``plan.rows``.
        here: the pages that this rank holds, where it does not hold them all.

    Returns:
        ``[T, Hkv, scored_blocks]`` int64, ascending.
    """
    if plan.group is None or plan.scoring is None or operands.k_summary is None:
        return None
    return select_tokens(
        q,
        plan.positions,
        operands.k_cache,
        operands.k_summary,
        plan.scoring,
        plan.group,
        rule,
        operands.softmax_scale,
        here,
        operands.gates,
    )


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


def select_group(
    q: torch.Tensor,
    position: int,
    first: int,
    group: TileGroup,
    k_cache: torch.Tensor,
    summaries: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    gates: Gates | None = None,
) -> torch.Tensor:
    """Blocks of neighbouring tiles of one request's prefill.

    Args:
        q: ``[n, Hkv, G, D]``, the tiles' queries, from ``position`` on.
        first: position of the first tile.
        group: the tiles.
        summaries: what :func:`prefill_summaries` returns.

    Returns:
        ``[tiles, Hkv, scored_blocks]`` int64, ascending.
    """
    end = position + q.shape[0]
    if policy.query_tile == 1:
        where = torch.arange(position, end)
        plan = plan_tokens(group.table, where, policy)
        if policy.ranking == "infllm":
            blocks = plan.index.num_blocks
            q = unrotated(q, group.rotation, where)
            scores = infllm_scores(q, where, summaries, blocks, policy, softmax_scale)
            return list_best(scores, plan.outside, policy.scored_blocks)
        return select_tokens(
            q, where, k_cache, summaries, plan, group, policy, softmax_scale, gates=gates
        )
    tiles = (end - 1) // policy.query_tile - first // policy.query_tile + 1

    def samples(stride: int) -> tuple[torch.Tensor, torch.Tensor]:
        where = sampled_rows(first, tiles, position, end, policy.query_tile, stride)
        return q[(where - position).clamp(min=0)].permute(0, 2, 1, 3, 4), where

    listed = tile_candidates(
        *samples(policy.sample_stride), first, summaries, policy, softmax_scale
    )
    ranking = samples(policy.ranking_stride)
    return rank_blocks(*ranking, k_cache, group, listed, policy, softmax_scale)


def prefill_summaries(
    k_cache: torch.Tensor,
    k_summary: torch.Tensor | None,
    plan: PrefillPlan,
    length: int,
    policy: SelectionPolicy,
) -> torch.Tensor:
    """Means of a prefill's K, ``[Hkv, means, D]``; for a ``query_tile`` of 1 ``k_summary``."""
    if policy.ranking == "infllm":
        blocks = ceil_div(length, policy.sel_block_size)
        rotation = plan.groups[0][2].rotation
        return semantic_kernels(k_cache, plan.table[0], blocks, policy, rotation)
    if policy.query_tile == 1:
        return given_summary(k_summary)
    return cell_means(read_sequence(k_cache, plan.table[0], length))


def select_blocks_eager(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    k_summary: torch.Tensor | None,
    softmax_scale: float,
    lists: torch.Tensor | None = None,
    gates: Gates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch form of :func:`sparsek_kernels.paged.select_blocks`.

    Returns:
        ``[decode tokens, Hkv, scored_blocks of policy.per_token()]`` and
        ``[prefill tiles, Hkv, scored_blocks of policy]``, int64, ascending; -1 where a tile sees
        everything.
    """
    heads, page_size, dim = k_cache.shape[1:]
    grouped = q.unflatten(1, (heads, -1))
    lengths, counts = host_lengths(batch)
    rule = policy.per_token()

    def nothing(tiles: int, blocks: int) -> torch.Tensor:
        return torch.full((tiles, heads, blocks), -1, dtype=torch.int64)

    decoded = nothing(batch.num_decode_tokens, rule.scored_blocks)
    plan = plan_decodes(batch, rule, page_size)
    if plan.scoring is not None and plan.group is not None:
        rows = grouped.index_select(0, plan.rows)
        decoded[plan.rows] = select_tokens(
            rows,
            plan.positions,
            k_cache,
            given_summary(k_summary),
            plan.scoring,
            plan.group,
            rule,
            softmax_scale,
            gates=gates,
        )
    tile = policy.query_tile
    chosen = [nothing(0, policy.scored_blocks)]
    token = batch.first_row + sum(counts[: batch.num_decodes])
    for request in range(batch.num_decodes, batch.num_requests):
        length, end = lengths[request], token + counts[request]
        position = length - counts[request]
        tiles_here = policy.num_tiles(position, length)
        if lists is not None:
            starts = (position // tile + torch.arange(tiles_here)) * tile
            chosen.append(listed_blocks(lists, starts, policy).long())
            token = end
            continue
        found = nothing(tiles_here, policy.scored_blocks)
        prefill = plan_prefill(batch, request, policy, group_tiles(policy, heads, dim), page_size)
        if prefill.groups:
            summaries = prefill_summaries(k_cache, k_summary, prefill, length, policy)
        for first, tiles, group in prefill.groups:
            begin = max(first, prefill.dense_end, position)
            stop = min(first + tiles * tile, length)
            rows = grouped[token + begin - position : token + stop - position]
            row = first // tile - position // tile
            found[row : row + tiles] = select_group(
                rows, begin, first, group, k_cache, summaries, policy, softmax_scale, gates
            )
        chosen.append(found)
        token = end
    return decoded, torch.cat(chosen)

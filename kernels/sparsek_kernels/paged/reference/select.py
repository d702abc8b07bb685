"""Blocks that a tile or a token selects, query by query, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.reference.sketch import VECTOR_SIZE, means_reference, sketch_reference


def block_logits_reference(
    q: torch.Tensor, vectors: torch.Tensor, per_block: int, softmax_scale: float
) -> torch.Tensor:
    """Block logits of one query: the best of each block's vectors.

    Args:
        q: ``[Hq, D]``; vectors: ``[n, Hkv, D]`` float64.

    Returns:
        ``[Hq, complete blocks]`` float64.
    """
    group = q.shape[0] // vectors.shape[1]
    blocks = vectors.shape[0] // per_block
    shared = vectors[: blocks * per_block].repeat_interleave(group, dim=1)  # [vectors, Hq, D]
    logits = torch.einsum("hd,chd->hc", q.double(), shared)
    highest: torch.Tensor = logits.unflatten(1, (blocks, per_block)).amax(-1)
    return highest * softmax_scale


def block_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    position: int,
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores of the blocks before the query's own, summed over each GQA group.

    Single tokens go by the sketch, tiles by the means of cells.

    Args:
        q: ``[Hq, D]``, the query at ``position``.
        k: ``[N, Hkv, D]``.

    Returns:
        ``[Hkv, position // sel_block_size]`` float64.
    """
    own_block = position // policy.sel_block_size
    seen = k[: own_block * policy.sel_block_size]
    if policy.query_tile == 1:
        vectors, size = sketch_reference(seen), VECTOR_SIZE
    else:
        vectors, size = means_reference(seen, CELL_SIZE), CELL_SIZE
    logits = block_logits_reference(q, vectors, policy.sel_block_size // size, softmax_scale)
    scores: torch.Tensor = torch.softmax(logits, dim=-1).unflatten(0, (k.shape[1], -1)).sum(1)
    return scores


def sampled_queries(positions: Sequence[int], policy: SelectionPolicy) -> list[int]:
    """Which of the queries at ``positions`` are samples: of every stride of a tile, the last."""
    tile, stride = policy.query_tile, policy.sample_stride
    strides = [(p // tile, p % tile // stride) for p in positions]
    return list({of: row for row, of in enumerate(strides)}.values())


def candidate_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores by summaries of the blocks that a list may have: ``[Hkv, blocks]`` float64.

    The samples of its tiles give them, except of tiles that see everything.

    Args:
        q: ``[n, Hq, D]``, the queries of the list's tiles, at ``positions`` (ascending,
            consecutive); or the query of a single token.
        k: ``[N, Hkv, D]``.
    """
    _, last = list_range_reference(positions, policy)
    total = torch.zeros(k.shape[1], last, dtype=torch.float64)
    for row in sampled_queries(positions, policy):
        if policy.sees_all(positions[row]):
            continue
        scores = block_scores_reference(q[row], k, positions[row], policy, softmax_scale)
        total += scores[:, :last]
    return total


def candidates_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> list[list[int]]:
    """The candidates of a list: the best blocks by what summaries tell.

    Args:
        q: ``[n, Hq, D]``, the queries of the list's tiles, at ``positions`` (ascending,
            consecutive).
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head, at most ``policy.listed_blocks`` ascending block indices.
    """
    first, last = list_range_reference(positions, policy)
    total = candidate_scores_reference(q, k, positions, policy, softmax_scale)
    listed = [best(scores, range(first, last), policy.listed_blocks) for scores in total]
    rows = sampled_queries(positions, policy)
    samples = [row for row in rows if not policy.sees_all(positions[row])]
    least = policy.min_mass * len(samples) * q.shape[1] / k.shape[1]
    return [
        [b for b in blocks if row[b] >= least] for row, blocks in zip(total, listed, strict=True)
    ]


def list_range_reference(positions: Sequence[int], policy: SelectionPolicy) -> tuple[int, int]:
    """Half-open range of blocks that the candidates of the list of these queries come from."""
    first, last = policy.list_range(positions[0])
    return first, max(last, first)


def competing_reference(
    listed: Sequence[Sequence[int]], position: int, policy: SelectionPolicy
) -> list[list[int]]:
    """Blocks that compete for the places of the tile at ``position``, ascending, by KV head.

    These are the candidates, and the blocks from there to the tile's windows.
    """
    _, last = policy.list_range(position)
    first_local, _ = policy.local_range(position)
    between = range(max(last, policy.sink_blocks), first_local)
    return [[*blocks, *between] for blocks in listed]


def exact_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    listed: list[list[int]],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Attention masses of a list's blocks, summed over the tile's samples and each GQA group.

    A query's masses are shares of what it gives to the candidates, the sinks and everything from
    the windows of the list's first tile on.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        listed: for each KV head, blocks of :func:`candidates_reference`.

    Returns:
        ``[Hkv, blocks]`` float64; blocks that are not read have no meaning.
    """
    size, num_kv_heads = policy.sel_block_size, k.shape[1]
    blocks = -(-k.shape[0] // size)
    _, first_local = policy.list_range(positions[0])
    block = torch.arange(blocks)
    read = torch.stack([torch.isin(block, torch.tensor(of, dtype=torch.long)) for of in listed])
    read |= (block < policy.sink_blocks) | (block >= first_local)
    total = torch.zeros(num_kv_heads, blocks, dtype=torch.float64)
    for row in sampled_queries(positions, policy):
        seen = k[: positions[row] + 1].double()
        heads = q[row].double().unflatten(0, (num_kv_heads, -1))
        logits = torch.einsum("hgd,nhd->hgn", heads, seen) * softmax_scale
        known = read.repeat_interleave(size, 1)[:, None, : seen.shape[0]]
        probs = logits.masked_fill(~known, float("-inf")).softmax(-1).sum(1)
        padded = torch.nn.functional.pad(probs, (0, blocks * size - seen.shape[0]))
        total += padded.unflatten(-1, (blocks, size)).sum(-1)
    return total


def best(scores: torch.Tensor, blocks: range | list[int], count: int) -> list[int]:
    """The ``count`` best of ``blocks``, ascending; ties go to the lower index."""
    return sorted(sorted(blocks, key=lambda b: (-float(scores[b]), b))[:count])


def select_blocks_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> dict[int, list[list[int]] | None]:
    """Blocks that compete by score and win, for the tiles of one list.

    Args:
        q: ``[n, Hq, D]``, the queries of the list's tiles, at ``positions`` (ascending,
            consecutive); a single token has a list of its own.
        k: ``[N, Hkv, D]``.

    Returns:
        By tile (``position // query_tile``), for each KV head ascending block indices; ``None``
        where the tile sees everything.
    """
    found: dict[int, list[list[int]] | None] = {}
    listed: list[list[int]] | None = None
    for tile, rows in tiles_of(positions, policy).items():
        mine = [positions[row] for row in rows]
        if policy.sees_all(mine[0]):
            found[tile] = None
            continue
        if policy.query_tile == 1:
            scores = candidate_scores_reference(q[rows], k, mine, policy, softmax_scale)
            competing = [list(range(*policy.candidate_range(mine[0])))] * len(scores)
            samples = mine
        else:
            if listed is None:
                listed = candidates_reference(q, k, positions, policy, softmax_scale)
            scores = exact_scores_reference(q[rows], k, mine, listed, policy, softmax_scale)
            competing = competing_reference(listed, mine[0], policy)
            samples = sampled_queries(mine, policy)
        places = policy.head_places or (policy.scored_blocks,) * len(competing)
        least = policy.min_mass * len(samples) * q.shape[1] / k.shape[1]
        heads = zip(scores, competing, places, strict=True)
        chosen = [best(row, blocks, count) for row, blocks, count in heads]
        found[tile] = [
            [b for b in blocks if row[b] >= least]
            for row, blocks in zip(scores, chosen, strict=True)
        ]
    return found


def tiles_of(positions: Sequence[int], policy: SelectionPolicy) -> dict[int, list[int]]:
    """Indices of the queries at ``positions``, by the tile they belong to."""
    tiles: dict[int, list[int]] = {}
    for row, position in enumerate(positions):
        tiles.setdefault(position // policy.query_tile, []).append(row)
    return tiles


Select: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, list[int], SelectionPolicy, float],
    dict[int, list[list[int]] | None],
]
"""A function like :func:`select_blocks_reference`."""


def listed_reference(entries: list[list[int]]) -> Select:
    """A function that chooses prefill tiles' blocks by ranked lists, and single tokens' by score.

    Args:
        entries: for each KV head; ``e >= 0`` is block ``e``, ``e < 0`` the block ``-e`` before the
            one in which the tile begins.
    """

    def select(
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> dict[int, list[list[int]] | None]:
        if policy.query_tile == 1:
            return select_blocks_reference(q, k, positions, policy, softmax_scale)
        return {tile: of_tile(tile, policy) for tile in tiles_of(positions, policy)}

    def of_tile(tile: int, policy: SelectionPolicy) -> list[list[int]] | None:
        start = tile * policy.query_tile
        if policy.sees_all(start):
            return None
        first, last = policy.candidate_range(start)
        own = start // policy.sel_block_size
        chosen = []
        for ranked in entries:
            blocks = [e if e >= 0 else own + e for e in ranked]
            blocks += range(last - 1, first - 1, -1)  # the nearest, where the list ends early
            competing = [b for b in dict.fromkeys(blocks) if first <= b < last]
            chosen.append(sorted(competing[: policy.scored_blocks]))
        return chosen

    return select

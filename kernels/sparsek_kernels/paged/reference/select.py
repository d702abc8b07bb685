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
    """Which of a tile's queries at ``positions`` score its blocks: of every stride, the last."""
    return _last_of_strides(positions, policy.query_tile, policy.sample_stride)


def ranking_queries(positions: Sequence[int], policy: SelectionPolicy) -> list[int]:
    """Which of a tile's queries at ``positions`` rank its candidates."""
    return _last_of_strides(positions, policy.query_tile, policy.ranking_stride)


def _last_of_strides(positions: Sequence[int], tile: int, stride: int) -> list[int]:
    return list({p % tile // stride: row for row, p in enumerate(positions)}.values())


def candidate_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores by summaries of the blocks up to a tile's last candidate: ``[Hkv, blocks]`` float64.

    The queries of :func:`sampled_queries` give them.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
    """
    _, last = policy.candidate_range(positions[0])
    total = torch.zeros(k.shape[1], last, dtype=torch.float64)
    for row in sampled_queries(positions, policy):
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
    """The blocks of one tile that are ranked exactly: the best by what summaries tell.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head, at most ``policy.listed_blocks`` ascending block indices.
    """
    first, last = policy.candidate_range(positions[0])
    total = candidate_scores_reference(q, k, positions, policy, softmax_scale)
    return [best(scores, range(first, last), policy.listed_blocks) for scores in total]


def exact_masses_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    listed: list[list[int]],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """What each of the tile's ranking queries gives to the listed blocks, summed over a GQA group.

    A query's masses are shares of what it gives to the listed blocks, the sinks and its window.
    Candidates are ranked by the largest of a block's masses.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        listed: for each KV head, blocks of :func:`candidates_reference`.

    Returns:
        ``[samples, Hkv, blocks]`` float64; blocks that are not listed have no meaning.
    """
    size, num_kv_heads = policy.sel_block_size, k.shape[1]
    blocks = -(-k.shape[0] // size)
    first_local, _ = policy.local_range(positions[0])
    block = torch.arange(blocks)
    read = torch.stack([torch.isin(block, torch.tensor(of, dtype=torch.long)) for of in listed])
    read |= (block < policy.sink_blocks) | (block >= first_local)
    masses = []
    for row in ranking_queries(positions, policy):
        seen = k[: positions[row] + 1].double()
        heads = q[row].double().unflatten(0, (num_kv_heads, -1))
        logits = torch.einsum("hgd,nhd->hgn", heads, seen) * softmax_scale
        known = read.repeat_interleave(size, 1)[:, None, : seen.shape[0]]
        probs = logits.masked_fill(~known, float("-inf")).softmax(-1).sum(1)
        padded = torch.nn.functional.pad(probs, (0, blocks * size - seen.shape[0]))
        masses.append(padded.unflatten(-1, (blocks, size)).sum(-1))
    return torch.stack(masses)


def best(scores: torch.Tensor, blocks: range | list[int], count: int) -> list[int]:
    """The ``count`` best of ``blocks``, ascending; ties go to the lower index."""
    return sorted(sorted(blocks, key=lambda b: (-float(scores[b]), b))[:count])


def select_blocks_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> list[list[int]] | None:
    """Blocks that compete by score and win, for the queries of one tile.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions``.
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head, ascending block indices; ``None`` where the tile sees everything.
    """
    if policy.sees_all(positions[0]):
        return None
    if policy.query_tile == 1:
        first, last = policy.candidate_range(positions[0])
        scores = candidate_scores_reference(q, k, positions, policy, softmax_scale)
        listed = [list(range(first, last))] * len(scores)
    else:
        listed = candidates_reference(q, k, positions, policy, softmax_scale)
        masses = exact_masses_reference(q, k, positions, listed, policy, softmax_scale)
        scores = masses.amax(0)
    return [
        best(row, blocks, policy.scored_blocks) for row, blocks in zip(scores, listed, strict=True)
    ]


Select: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, list[int], SelectionPolicy, float], list[list[int]] | None
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
    ) -> list[list[int]] | None:
        if policy.query_tile == 1:
            return select_blocks_reference(q, k, positions, policy, softmax_scale)
        if policy.sees_all(positions[0]):
            return None
        first, last = policy.candidate_range(positions[0])
        own = positions[0] // policy.query_tile * policy.query_tile // policy.sel_block_size
        chosen = []
        for ranked in entries:
            blocks = [e if e >= 0 else own + e for e in ranked]
            blocks += range(last - 1, first - 1, -1)  # the nearest, where the list ends early
            competing = [b for b in dict.fromkeys(blocks) if first <= b < last]
            chosen.append(sorted(competing[: policy.scored_blocks]))
        return chosen

    return select

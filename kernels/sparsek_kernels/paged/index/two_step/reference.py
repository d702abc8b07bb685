"""Oracle of a prefill tile's two steps, query by query, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sparsek_kernels.paged.index.reference import block_scores_reference, means_reference
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.sample_reference import Choice, draw_by_scores, start_reference


def sampled_queries(positions: Sequence[int], policy: SelectionPolicy) -> list[int]:
    """Which of a tile's queries at ``positions`` score its blocks: of every stride, the last."""
    return _last_of_strides(positions, policy.query_tile, policy.sample_stride)


def ranking_queries(positions: Sequence[int], policy: SelectionPolicy) -> list[int]:
    """Which of a tile's queries at ``positions`` rank its candidates."""
    return _last_of_strides(positions, policy.query_tile, policy.ranking_stride)


def _last_of_strides(positions: Sequence[int], tile: int, stride: int) -> list[int]:
    return list({p % tile // stride: row for row, p in enumerate(positions)}.values())


def tile_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores by means of cells of the blocks up to a tile's last candidate: ``[Hkv, blocks]``.

    The queries of :func:`sampled_queries` give them.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
    """
    size, (_, last) = policy.sel_block_size, policy.candidate_range(positions[0])
    total = torch.zeros(k.shape[1], last, dtype=torch.float64)
    for row in sampled_queries(positions, policy):
        means = means_reference(k[: positions[row] // size * size], CELL_SIZE)
        total += block_scores_reference(q[row], means, size // CELL_SIZE, softmax_scale)[:, :last]
    return total


def candidates_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> Choice:
    """The blocks of one tile that are ranked exactly: a sample by what summaries tell.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head a list of as many places as the tile's rule lists.
    """
    policy = policy.at(positions[0])
    first, _ = policy.candidate_range(positions[0])
    scores = tile_scores_reference(q, k, positions, policy, softmax_scale)[:, first:]
    rows = policy.samples * (q.shape[1] // k.shape[1])
    start = start_reference(_base(positions, policy))
    order = range(scores.shape[1])
    return draw_by_scores(scores, start, policy.listed_blocks, first, rows, order=order)


def _base(positions: Sequence[int], policy: SelectionPolicy) -> int:
    """Position of a tile's first query, whatever chunk it came with."""
    return positions[0] // policy.query_tile * policy.query_tile


def exact_masses_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    listed: Sequence[Sequence[int]],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """What each of the tile's ranking queries gives to the listed blocks, summed over a GQA group.

    A query's block probabilities are shares of what it gives to the listed blocks, the sinks and
    its window.  A listed block counts for as many as it stands for.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        listed: for each KV head, entries of :func:`candidates_reference`.

    Returns:
        ``[samples, Hkv, blocks]`` float64; blocks that are not listed have no meaning.
    """
    size, num_kv_heads = policy.sel_block_size, k.shape[1]
    blocks = -(-k.shape[0] // size)
    first_local, _ = policy.local_range(positions[0])
    block = torch.arange(blocks)
    forced = (block < policy.sink_blocks) | (block >= first_local)
    logs = torch.where(forced, 0.0, -math.inf).double().repeat(num_kv_heads, 1)
    for mine, entries in zip(logs, listed, strict=True):
        for entry in entries:
            if entry >= 0:
                mine[entry % 2**21] = entry // 2**21 / 32 * math.log(2.0)
    probabilities = []
    for row in ranking_queries(positions, policy):
        seen = k[: positions[row] + 1].double()
        heads = q[row].double().unflatten(0, (num_kv_heads, -1))
        logits = torch.einsum("hgd,nhd->hgn", heads, seen) * softmax_scale
        logits += logs.repeat_interleave(size, 1)[:, None, : seen.shape[0]]
        probs = logits.softmax(-1).sum(1)
        padded = torch.nn.functional.pad(probs, (0, blocks * size - seen.shape[0]))
        probabilities.append(padded.unflatten(-1, (blocks, size)).sum(-1))
    return torch.stack(probabilities)


def select_tile_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
    listed: Sequence[Sequence[int]] | None = None,
) -> Choice:
    """The blocks of one tile that does not see everything.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        listed: for each KV head, entries of candidates; by default those of
            :func:`candidates_reference`.

    Returns:
        For each KV head a list of ``policy.places(positions[0])`` places.
    """
    policy = policy.at(positions[0])
    first, last = policy.candidate_range(positions[0])
    if listed is None:
        listed = candidates_reference(q, k, positions, policy, softmax_scale).entries
    masses = exact_masses_reference(q, k, positions, listed, policy, softmax_scale).amax(0)
    there = torch.zeros(len(listed), last - first, dtype=torch.bool)
    known = torch.zeros(len(listed), last - first, dtype=torch.long)
    for head, entries in enumerate(listed):
        for entry in entries:
            if entry >= 0:
                there[head, entry % 2**21 - first] = True
                known[head, entry % 2**21 - first] = entry // 2**21
    rows = policy.ranking_samples * (q.shape[1] // k.shape[1])
    start = start_reference(_base(positions, policy), again=True)
    return draw_by_scores(
        masses[:, first:last],
        start,
        policy.scored_blocks,
        first,
        rows,
        order=range(last - first),
        there=there,
        known=known,
    )

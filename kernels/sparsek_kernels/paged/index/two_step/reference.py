"""Oracle of a prefill tile's two steps, query by query, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsek_kernels.paged.index.reference import best, block_scores_reference, means_reference
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy


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
) -> list[list[int]]:
    """The blocks of one tile that are ranked exactly: the best by what summaries tell.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head, at most ``policy.listed_blocks`` ascending block indices.
    """
    first, last = policy.candidate_range(positions[0])
    total = tile_scores_reference(q, k, positions, policy, softmax_scale)
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

    A query's block probabilities are shares of what it gives to the listed blocks, the sinks and
    its window.  Candidates are ranked by the largest that one of these queries gives.

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
    probabilities = []
    for row in ranking_queries(positions, policy):
        seen = k[: positions[row] + 1].double()
        heads = q[row].double().unflatten(0, (num_kv_heads, -1))
        logits = torch.einsum("hgd,nhd->hgn", heads, seen) * softmax_scale
        known = read.repeat_interleave(size, 1)[:, None, : seen.shape[0]]
        probs = logits.masked_fill(~known, float("-inf")).softmax(-1).sum(1)
        padded = torch.nn.functional.pad(probs, (0, blocks * size - seen.shape[0]))
        probabilities.append(padded.unflatten(-1, (blocks, size)).sum(-1))
    return torch.stack(probabilities)

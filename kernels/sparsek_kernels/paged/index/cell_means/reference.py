"""Oracle of a prefill tile's choice, query by query, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsek_kernels.paged.index.reference import block_scores_reference, means_reference
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.sample_reference import Choice, draw_by_scores, start_reference


def sampled_queries(positions: Sequence[int], policy: SelectionPolicy) -> list[int]:
    """Which of a tile's queries at ``positions`` score its blocks: of every stride, the last."""
    tile, stride = policy.query_tile, policy.sample_stride
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


def select_tile_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> Choice:
    """The blocks of one tile that does not see everything.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.

    Returns:
        For each KV head a list of ``policy.scored_blocks`` places.
    """
    first, _ = policy.candidate_range(positions[0])
    scores = tile_scores_reference(q, k, positions, policy, softmax_scale)[:, first:]
    rows = policy.samples * (q.shape[1] // k.shape[1])
    base = positions[0] // policy.query_tile * policy.query_tile  # whatever chunk it came with
    order = range(scores.shape[1])
    return draw_by_scores(
        scores, start_reference(base), policy.scored_blocks, first, rows, order=order
    )

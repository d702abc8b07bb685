"""Oracle of a prefill tile's two steps, query by query, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsek_kernels.paged.index.reference import (
    best,
    block_scores_reference,
    drawn_reference,
    explained_reference,
    means_reference,
    share_reference,
    start_reference,
    threshold_reference,
)
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

    Candidates are ranked by the largest that one of these queries gives.

    Returns:
        ``[samples, Hkv, blocks]`` float64, sums of :func:`head_masses_reference`.
    """
    return head_masses_reference(q, k, positions, listed, policy, softmax_scale).sum(2)


def head_masses_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    listed: list[list[int]],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """What each of the tile's ranking queries gives to the listed blocks.

    A query's block probabilities are shares of what it gives to the listed blocks, the sinks and
    its window.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        listed: for each KV head, blocks of :func:`candidates_reference`.

    Returns:
        ``[samples, Hkv, G, blocks]`` float64; blocks that are not listed have no meaning.
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
        probs = logits.masked_fill(~known, float("-inf")).softmax(-1)
        padded = torch.nn.functional.pad(probs, (0, blocks * size - seen.shape[0]))
        probabilities.append(padded.unflatten(-1, (blocks, size)).sum(-1))
    return torch.stack(probabilities)


def quarters_reference(scores: torch.Tensor) -> torch.Tensor:
    """Quarters of octaves ``[n]`` of scores, as integers that count up with them."""
    scores = torch.where(scores > 2.0**-48, scores, 2.0**-48)
    fraction, exponent = torch.frexp(scores)  # scores are fraction * 2 ** exponent
    return 4 * exponent + ((fraction - 0.5) * 8.0).floor().long()


def draw_blocks_reference(
    scores: torch.Tensor, blocks: list[int], count: int, start: int
) -> list[int]:
    """A sample of ``blocks``, ascending, as entries ``block + (steps << 21)``.

    Args:
        scores: ``[n]`` float64, of these blocks.
        blocks: ascending; at least ``count``.
        count: places.
        start: what the sum of shares begins with, of 65536.
    """
    if not blocks:
        return []
    quarters = quarters_reference(scores)
    keys = (63 - quarters.max() + quarters).clamp(min=0)
    steps = (threshold_reference(keys, count) - 8 * keys).clamp(0, 512)
    drawn = drawn_reference(share_reference(steps).tolist(), start, count)
    return [blocks[index] + (int(steps[index]) << 21) for index in drawn]


def sample_blocks_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> list[list[int]]:
    """The sample of one tile's blocks: for each KV head entries, ascending, then -1.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
    """
    (first, last), places = policy.candidate_range(positions[0]), policy.scored_blocks
    means = tile_scores_reference(q, k, positions, policy, softmax_scale)
    listed = [best(scores, range(first, last), policy.listed_blocks) for scores in means]
    masses = head_masses_reference(q, k, positions, listed, policy, softmax_scale)
    exact = masses.square().sum((0, 2)).sqrt()
    start, lists = start_reference(positions[0] // policy.query_tile), []
    for head, mine in enumerate(listed):
        others = sorted({*range(first, last)} - {*mine})
        count = min(policy.other_blocks, len(others))
        entries = draw_blocks_reference(exact[head, mine], mine, places - count, start)
        entries += draw_blocks_reference(means[head, others], others, count, start)
        entries.sort(key=lambda entry: entry % 2**21)
        lists.append(entries + [-1] * (places - len(entries)))
    return lists


def drawn_error(
    scores: torch.Tensor,
    blocks: list[int],
    count: int,
    start: int,
    entries: list[int],
    tolerance: float,
) -> str:
    """What is wrong with entries of blocks that others drew; empty where nothing is.

    They are right if some scores within the tolerance explain them, as in ``list_error`` of
    ``page_records``.

    Args:
        scores, blocks, count, start: as :func:`draw_blocks_reference` takes them.
        entries: those of these blocks, ascending.
        tolerance: most relative error of a score.
    """
    turns = {block: turn for turn, block in enumerate(blocks)}
    drawn = {turns[entry % 2**21]: entry >> 21 for entry in entries}
    if len(drawn) < len(entries) or list(drawn) != sorted(drawn) or len(drawn) > count:
        return f"{entries} are too many, double or out of order"
    low, high = (quarters_reference(scores * (1 + error)) for error in (-tolerance, tolerance))
    lows, highs = (63 - high.max() + low).clamp(0, 63), (63 - low.max() + high).clamp(0, 63)
    ranges = list(zip(lows.tolist(), highs.tolist(), strict=True))
    first, last = (threshold_reference(keys, count) for keys in (lows, highs))
    if len(blocks) == count:
        first = last = 0
    reached = max(
        explained_reference(threshold, ranges, drawn, start, 1, 512)
        for threshold in range(first - 1, last + 2)
    )
    if reached == len(blocks):
        return ""
    block = blocks[reached]
    return f"block {block} (score {float(scores[reached]):.3g}) of {entries} is not explained"

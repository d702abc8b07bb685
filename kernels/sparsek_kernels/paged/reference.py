"""Oracle of paged attention: the rule of docs/selection.md, token by token, in float64.

Plain torch on contiguous sequences, readable before fast.  Nothing here is imported by a kernel
or by the CPU path, and nothing of theirs is imported here but the rule itself (``policy.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy

VECTOR_SIZE = 4
"""Tokens whose keys share one vector of the sketch."""


def gather_sequence(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of one sequence.  cache: ``[P, Hkv, page_size, D]``; returns ``[length, Hkv, D]``."""
    page_size = cache.shape[2]
    rows = [cache[int(pages[t // page_size]), :, t % page_size] for t in range(length)]
    return torch.stack(rows) if rows else cache.new_empty(0, cache.shape[1], cache.shape[3])


def means_reference(k: torch.Tensor, size: int) -> torch.Tensor:
    """Means ``[N // size, Hkv, D]`` float64 of every ``size`` keys.  k: ``[N, Hkv, D]``."""
    count = k.shape[0] // size
    means: torch.Tensor = k[: count * size].double().unflatten(0, (count, size)).mean(1)
    return means


def hadamard_reference(dim: int) -> torch.Tensor:
    """Rotation ``[D, D]`` float64: normalised Hadamard matrices, as large as divide ``D``."""
    size = dim & -dim
    i = torch.arange(dim)
    bits = (i[:, None] % size) & (i % size)
    odd = torch.stack([bits >> b & 1 for b in range(size.bit_length())]).sum(0) % 2
    together = i[:, None] // size == i // size
    return torch.where(together, (1.0 - 2.0 * odd.double()) * size**-0.5, 0.0)


def scale_reference(largest: torch.Tensor) -> torch.Tensor:
    """``largest / 8`` rounded to 4 significant bits, from ``2 ** -16`` to 61440."""
    fraction, exponent = torch.frexp((largest / 8.0).clamp(2.0**-16, 61440.0))
    return torch.ldexp((fraction * 16.0 + 0.5).floor(), exponent - 4)


def levels_reference(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels ``[n, D]`` from 0 to 15 of rotated vectors, and their scales ``[n]``: float64."""
    half = vectors.shape[1] // 2
    scales = scale_reference(vectors.abs().amax(1))
    values = (vectors / scales[:, None]).clamp(-7.49, 7.49)
    levels = values.floor()
    rest = values - (levels + 0.5)
    step = torch.where(rest < 0.0, -1.0, 1.0)
    levels = levels + 8.0
    channel = torch.arange(2 * half)
    weight = 2 ** (channel % half % 4 + 4 * (channel // half))
    fraction, exponent = torch.frexp(scales)
    missing = (exponent + 15) * 8 + (fraction * 16.0).long() - 8 - (levels.long() * weight).sum(1)
    rows = torch.arange(vectors.shape[0])
    for bit in range(8):  # what lower bits carry is known when a bit's turn comes
        distance = torch.where(weight == 1 << bit, rest.abs(), -1.0)
        nearest = 2 * half - 1 - distance.flip(1).argmax(1)
        moved = step[rows, nearest] * (missing >> bit & 1)
        levels[rows, nearest] += moved
        missing = missing - (moved.long() << bit)
    return levels, scales


def sketch_reference(k: torch.Tensor) -> torch.Tensor:
    """Keys as the sketch of a sequence's whole vectors gives them back, rotated back.

    Args:
        k: ``[N, Hkv, D]`` keys after RoPE.

    Returns:
        ``[N // 4, Hkv, D]`` float64.
    """
    rotation = hadamard_reference(k.shape[-1])
    means = means_reference(k, VECTOR_SIZE)
    levels, scales = levels_reference((means @ rotation).flatten(0, 1))
    values = ((levels - 7.5) * scales[:, None]).view_as(means)
    return values @ rotation


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
    """Which of a tile's queries at ``positions`` are its samples: of every stride, the last."""
    strides = [p % policy.query_tile // policy.sample_stride for p in positions]
    return list({stride: row for row, stride in enumerate(strides)}.values())


def candidate_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores by summaries of the blocks up to a tile's last candidate: ``[Hkv, blocks]`` float64.

    The tile's samples give them.

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
    listed = [best(scores, range(first, last), policy.listed_blocks) for scores in total]
    samples = sampled_queries(positions, policy)
    least = policy.min_mass * len(samples) * q.shape[1] / k.shape[1]
    return [
        [b for b in blocks if row[b] >= least] for row, blocks in zip(total, listed, strict=True)
    ]


def exact_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    listed: list[list[int]],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Attention masses of the listed blocks, summed over the tile's samples and each GQA group.

    A query's masses are shares of what it gives to the listed blocks, the sinks and its window.

    Args:
        q: ``[n, Hq, D]``, the tile's queries at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        listed: for each KV head, blocks of :func:`candidates_reference`.

    Returns:
        ``[Hkv, blocks]`` float64; blocks that are not listed have no meaning.
    """
    size, num_kv_heads = policy.sel_block_size, k.shape[1]
    blocks = -(-k.shape[0] // size)
    first_local, _ = policy.local_range(positions[0])
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
        scores = exact_scores_reference(q, k, positions, listed, policy, softmax_scale)
    places = policy.head_places or (policy.scored_blocks,) * len(listed)
    samples = sampled_queries(positions, policy)
    least = policy.min_mass * len(samples) * q.shape[1] / k.shape[1]
    heads = zip(scores, listed, places, strict=True)
    chosen = [best(row, blocks, count) for row, blocks, count in heads]
    return [
        [b for b in blocks if row[b] >= least] for row, blocks in zip(scores, chosen, strict=True)
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


def visible_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
    select: Select = select_blocks_reference,
) -> torch.Tensor:
    """Which keys each query sees.

    Args:
        q: ``[n, Hq, D]`` at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        select: what chooses the blocks of a tile.

    Returns:
        ``[n, Hkv, N]`` bool.
    """
    length, num_kv_heads = k.shape[0], k.shape[1]
    key = torch.arange(length)
    visible = torch.zeros(len(positions), num_kv_heads, length, dtype=torch.bool)
    tiles: dict[int, list[int]] = {}
    for row, position in enumerate(positions):
        tiles.setdefault(position // policy.query_tile, []).append(row)
    for rows in tiles.values():
        tile_positions = [positions[row] for row in rows]
        chosen: list[list[int]] | None = None
        if policy.selects_blocks:
            chosen = select(q[rows], k, tile_positions, policy, softmax_scale)
        for row, position in zip(rows, tile_positions, strict=True):
            causal = key <= position
            if policy.sees_all(position):
                visible[row] = causal
                continue
            if chosen is None:
                window = policy.window_size or 0
                visible[row] = causal & ((key < policy.num_sink) | (key > position - window))
                continue
            first_local, _ = policy.local_range(position)
            block = key // policy.sel_block_size
            forced = (block < policy.sink_blocks) | (block >= first_local)
            for head in range(num_kv_heads):
                selected = torch.isin(block, torch.tensor(chosen[head], dtype=torch.long))
                visible[row, head] = causal & (forced | selected)
    return visible


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention under an explicit mask; a row that sees nothing gives zeros.

    Args:
        q: ``[n, Hq, D]``; k, v: ``[N, Hkv, D]``; visible: ``[n, Hkv, N]``.
        sinks: ``[Hq]`` logits that join the denominator only.

    Returns:
        ``[n, Hq, Dv]`` float64.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    mask = visible.repeat_interleave(group, dim=1)
    logits = torch.einsum("nhd,khd->nhk", q.double(), keys) * softmax_scale
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.double()[None, :, None].expand(q.shape[0], -1, 1)
        probs = torch.softmax(torch.cat([logits, extra], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(logits, dim=-1)
    probs = torch.where(mask.any(-1, keepdim=True), probs, 0.0)
    return torch.einsum("nhk,khd->nhd", probs, values)


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    *,
    softmax_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    select: Select = select_blocks_reference,
) -> torch.Tensor:
    """What :func:`sparsek_kernels.paged.paged_attention` must return, in float64.

    The sketch is computed from K itself, so that this also checks the one kept in the cache.

    Args:
        select: what chooses the blocks of a tile, called for tiles in the order of their queries.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64)
    starts = batch.cu_seqlens_q.tolist()
    for request, length in enumerate(batch.seq_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        single = request < batch.num_decodes or policy.query_tile == 1
        rule = policy.per_token() if single else policy
        pages = batch.block_table[request]
        k = gather_sequence(k_cache, pages, length)
        v = gather_sequence(v_cache, pages, length)
        positions = list(range(length - (end - begin), length))
        visible = visible_reference(q[begin:end], k, positions, rule, scale, select)
        for row in range(max(end - begin - rule.dense_last, 0), end - begin):
            visible[row] = torch.arange(length) <= positions[row]
        out[begin:end] = attend_reference(q[begin:end], k, v, visible, scale, sinks)
    return out

"""Attention over a paged cache, token by token, in float64."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.index.two_step.reference import Select, select_blocks_reference


def gather_sequence(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of one sequence.  cache: ``[P, Hkv, page_size, D]``; returns ``[length, Hkv, D]``."""
    page_size = cache.shape[2]
    rows = [cache[int(pages[t // page_size]), :, t % page_size] for t in range(length)]
    return torch.stack(rows) if rows else cache.new_empty(0, cache.shape[1], cache.shape[3])


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

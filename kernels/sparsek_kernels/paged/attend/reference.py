"""Attention over a paged cache, token by token, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from sparsek_kernels.paged.policy import SelectionPolicy

Select: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, list[int], SelectionPolicy, float], list[list[int]] | None
]
"""Chooses the entries of a tile's or a token's list for each KV head: blocks, or with an alignment
cells, with weights (``sample.py``); ``None`` where the tile sees everything."""


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
    select: Select,
) -> torch.Tensor:
    """Which keys each query sees, ``[n, Hkv, N]`` bool: see :func:`logs_reference`."""
    return logs_reference(q, k, positions, policy, softmax_scale, select) > -math.inf


def logs_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
    select: Select,
) -> torch.Tensor:
    """For how much each key counts to each query.

    Args:
        q: ``[n, Hq, D]`` at ``positions`` (ascending, consecutive).
        k: ``[N, Hkv, D]``.
        select: what chooses the blocks of a tile.

    Returns:
        ``[n, Hkv, N]`` float64, natural logs of weights; -inf where a key is not seen.
    """
    length, num_kv_heads = k.shape[0], k.shape[1]
    key = torch.arange(length)
    logs = torch.full((len(positions), num_kv_heads, length), -math.inf, dtype=torch.float64)
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
                logs[row] = causal.double().log()
                continue
            if chosen is None:
                window = policy.window_size or 0
                seen = causal & ((key < policy.num_sink) | (key > position - window))
                logs[row] = seen.double().log()
                continue
            first_local, _ = policy.local_range(position)
            block = key // policy.sel_block_size
            forced = (block < policy.sink_blocks) | (block >= first_local)
            for head, entries in enumerate(chosen):
                mine = (causal & forced).double().log()
                for entry in entries:
                    if entry >= 0:
                        selected = causal & (block == entry % 2**21)
                        mine[selected] = entry // 2**21 / 32 * math.log(2.0)
                logs[row, head] = mine
    return logs


def list_logs(
    entries: list[list[int]], length: int, start: int, policy: SelectionPolicy
) -> torch.Tensor:
    """Natural logs ``[Hkv, length]`` float64 of the weights of keys, by lists; -inf: not attended.

    Args:
        entries: for each KV head ``cell + (steps << 21)``, or -1.
        length: keys of the sequence.
        start: position of the first token that shares the lists.
        policy: one with an alignment.
    """
    first, last = policy.candidate_range(start)
    cell = torch.arange(length) // policy.sel_block_size
    near = (cell < first) | (cell >= last)
    logs = torch.where(near, 0.0, -math.inf).double().repeat(len(entries), 1)
    for mine, listed in zip(logs, entries, strict=True):
        for entry in listed:
            if entry >= 0:
                mine[cell == entry % 2**21] = entry // 2**21 / 32 * math.log(2.0)
    return logs


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention under an explicit mask; a row that sees nothing gives zeros.

    Args:
        q: ``[n, Hq, D]``; k, v: ``[N, Hkv, D]``; visible: ``[n, Hkv, N]``.
        sinks: ``[Hq]`` logits that join the denominator only.
        logs: ``[Hkv, N]`` or ``[n, Hkv, N]``, natural logs of the weights of keys
            (:func:`list_logs`, :func:`logs_reference`); anything where a key is not seen.

    Returns:
        ``[n, Hq, Dv]`` float64.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    mask = visible.repeat_interleave(group, dim=1)
    logits = torch.einsum("nhd,khd->nhk", q.double(), keys) * softmax_scale
    if logs is not None:
        logits = logits + logs.double().repeat_interleave(group, dim=-2)
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.double()[None, :, None].expand(q.shape[0], -1, 1)
        probs = torch.softmax(torch.cat([logits, extra], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(logits, dim=-1)
    probs = torch.where(mask.any(-1, keepdim=True), probs, 0.0)
    return torch.einsum("nhk,khd->nhd", probs, values)

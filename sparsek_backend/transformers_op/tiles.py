"""Tiles of queries over their blocks with weights, in torch: what gradients are taken of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from sparsek_backend.transformers_op.dense import MASKED_SDPA
from sparsek_kernels.paged.attend.cpu import attend_gathered
from sparsek_kernels.paged.attend.cpu_parts import blocks_and_logs
from sparsek_kernels.paged.policy import SelectionPolicy

_MOST_ELEMENTS = 1 << 25
"""Elements of K, or logits, that tiles may have at once: bounds memory."""


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    entries: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention ``[B, N, Hq, Dv]`` of the last N tokens, none of which sees everything.

    It has gradients of q, k, v and sinks.  The backward pass gathers keys and values again.

    Args:
        q: ``[B, N, Hq, D]``; k: ``[B, M, Hkv, D]``; v: ``[B, M, Hkv, Dv]``.
        entries: ``[B, tiles, Hkv, S]``, blocks with weights that tiles attend beyond sinks and
            window (``sparsek_kernels.paged.sample``).
        sinks: ``[Hq]`` logits that join the denominator only.
    """
    (batch, num_q, heads, dim), (num_k, kv_heads) = q.shape, k.shape[1:3]
    size, tile, tiles = policy.sel_block_size, policy.query_tile, entries.shape[1]
    group, start = heads // kv_heads, num_k - num_q
    before = start % tile
    q = F.pad(q, (0, 0, 0, 0, before, tiles * tile - before - num_q))
    q = q.view(batch, tiles, tile, kv_heads, group, dim).permute(0, 3, 1, 4, 2, 5).flatten(0, 1)
    # fp32, as a block's gradient is the sum of many tiles' gradients
    k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, -num_k % size)).float() for x in (k, v))
    k, v = (x.unflatten(2, (-1, size)).flatten(3).flatten(0, 1) for x in (k, v))
    blocks, logs = (x.transpose(1, 2).flatten(0, 1) for x in blocks_and_logs(entries))
    first = torch.arange(start - before, num_k, tile, device=q.device)
    local = policy.local_range(first)[0][:, None]
    local = local + torch.arange(policy.local_blocks, device=q.device)
    sink = torch.arange(policy.sink_blocks, device=q.device).expand(tiles, -1)
    forced = torch.cat([sink, local], dim=1)
    # Forced blocks come first: every query sees the first key of its list.
    blocks = torch.cat([forced.expand(batch * kv_heads, -1, -1), blocks], dim=2)
    logs = F.pad(logs, (forced.shape[1], 0))
    per_step = max(_MOST_ELEMENTS // (blocks.shape[2] * size * max(dim, group * tile)), 1)
    of_heads = (None,) * kv_heads if sinks is None else sinks.view(kv_heads, group).unbind()
    # One KV head at a time: a step's gradient of K is as large as a head's, zeros included.
    by_head = zip(q, k.unbind(), v.unbind(), blocks, logs, of_heads * batch, strict=True)
    parts = []
    for rows, keys, values, listed, weights, sink_logits in by_head:
        for step in zip(*(x.split(per_step) for x in (rows, listed, weights, first)), strict=True):
            given = (*step, keys, values, softmax_scale, sink_logits)
            parts.append(checkpoint(_attend, *given, use_reentrant=False, preserve_rng_state=False))
    out = torch.cat(parts).view(batch, kv_heads, tiles, group, tile, -1)
    return out.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)[:, before : before + num_q]


def _attend(
    q: torch.Tensor,
    blocks: torch.Tensor,
    logs: torch.Tensor,
    first: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention ``[T, G, Q, Dv]`` of one KV head's tiles.

    Args:
        q: ``[T, G, Q, D]``.
        blocks: ``[T, n]``; one behind the last is not seen.
        logs: ``[T, n]`` of their weights.
        first: ``[T]`` position of each tile's first query.
        k: ``[blocks, size * D]`` fp32; v: ``[blocks, size * Dv]`` fp32.
        sinks: ``[G]``, or ``None``.
    """
    size = k.shape[1] // q.shape[3]
    key = (blocks[..., None] * size + torch.arange(size, device=q.device)).flatten(1)
    query = first[:, None] + torch.arange(q.shape[2], device=q.device)
    bias = logs.repeat_interleave(size, dim=1)[:, None]
    bias = bias.masked_fill(key[:, None] > query[..., None], float("-inf"))[:, None]
    blocks = blocks.clamp(max=len(k) - 1)
    k, v = (
        F.embedding(blocks, x).unflatten(2, (size, -1)).flatten(1, 2)[:, None].to(q.dtype)
        for x in (k, v)
    )
    with sdpa_kernel(MASKED_SDPA):
        return attend_gathered(q[:, None], k, v, bias, softmax_scale, sinks).squeeze(1)

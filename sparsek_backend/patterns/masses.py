"""How much each key block matters to each query block, from a few queries of each block."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F

from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_heads, check_int, check_qkv, check_scale

Measure = Literal["mass", "l1", "l2"]
_MOST_SCORES = 1 << 26
"""Scores held at a time: of a few query blocks to all keys."""


def visible_blocks(num_q: int, num_k: int, block_size: int, causal: bool) -> torch.Tensor:
    """``[R, C]`` bool: the blocks in which some query sees some key."""
    rows, cols = -(-num_q // block_size), -(-num_k // block_size)
    if not causal:
        return torch.ones(rows, cols, dtype=torch.bool)
    last = ((torch.arange(rows) + 1) * block_size).clamp(max=num_q) - 1 + num_k - num_q
    return torch.arange(cols) * block_size <= last[:, None]


@torch.no_grad()
def sampled_block_masses(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_size: int,
    *,
    measure: Measure = "mass",
    samples: int = 4,
    causal: bool = True,
    softmax_scale: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``[Hq, R, C]`` fp32: what each key block is to a query block, over all queries looked at.

    Exact attention of ``samples`` queries of each block over all keys.  With as many samples as a
    block has tokens nothing is sampled.  Scores are computed a few blocks at a time, never for
    all queries at once.

    Args:
        q: ``[B, N, Hq, D]``, any floating dtype.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        block_size: tokens along a side of a block.
        measure: ``mass`` is attention, ``l1`` and ``l2`` are norms of what a block's keys add to
            the output.  Of keys ``j`` of the block and queries: ``mass`` is the mean over queries
            of the sum of ``p_j``, ``l1`` that of the sum of ``p_j |v_j|_1``, ``l2`` the root of the
            mean over queries of the sum of ``(p_j |v_j|_2)^2``.
        samples: queries of each block, spread over it.
        causal: whether queries see earlier keys only (bottom-right aligned).
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        generator: on the CPU; draws the queries.

    Raises:
        ValueError: an argument out of range, or tensors that do not fit each other.
    """
    check_qkv(q, k, v)
    check_block_size(block_size)
    check_int("samples", samples, 1)
    if measure not in get_args(Measure):
        raise ValueError(f"measure: expected 'mass', 'l1' or 'l2', got {measure!r}")
    scale = check_scale(softmax_scale, q.shape[3])
    batch, num_q, num_heads, _ = q.shape
    num_k, num_kv_heads = k.shape[1], k.shape[2]
    group = check_heads(num_heads, num_kv_heads)
    tokens, real = (x.to(q.device) for x in sampled_tokens(num_q, block_size, samples, generator))
    rows, taken = tokens.shape
    # Products of half precision may pass its largest number before they are scaled.
    product = torch.float32 if q.dtype == torch.float16 else q.dtype
    keys = k.permute(0, 2, 3, 1).to(product)  # [B, Hkv, D, M]
    sizes = None  # of the values, [B, Hkv, 1, 1, M], where they count
    if measure != "mass":
        norms = v.float().norm(p=1 if measure == "l1" else 2, dim=3)  # [B, M, Hkv]
        sizes = norms.transpose(1, 2)[:, :, None, None]
    key = torch.arange(num_k, device=q.device)
    step = max(_MOST_SCORES // max(batch * num_heads * taken * num_k, 1), 1)
    found = []
    for first in range(0, rows, step):
        chosen = tokens[first : first + step].flatten()  # [T]
        queries = q[:, chosen].unflatten(2, (num_kv_heads, group))
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G T, D]
        with torch.autocast(q.device.type, enabled=False):
            scores = torch.matmul(queries.to(product), keys).float().mul_(scale)
        scores = scores.unflatten(2, (group, -1))  # [B, Hkv, G, T, M]
        if causal:
            at = chosen + (num_k - num_q)
            scores.masked_fill_(key > at[:, None], float("-inf"))
        parts = scores.softmax(-1).nan_to_num_(0.0)
        if sizes is not None:
            parts.mul_(sizes)
        if measure == "l2":
            parts.square_()
        parts = F.pad(parts, (0, -num_k % block_size)).unflatten(4, (-1, block_size)).sum(5)
        parts = parts.unflatten(3, (-1, taken)) * real[first : first + step, :, None]
        counts = real[first : first + step].sum(1)[:, None]
        found.append(parts.sum(4).mean(0) / counts)  # [Hkv, G, rows, C]
    mass = torch.cat(found, 2).flatten(0, 1)
    return mass.sqrt_() if measure == "l2" else mass


def sampled_tokens(
    num_q: int, block_size: int, samples: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R, S]`` tokens of each query block, and which of them exist."""
    first = torch.arange(0, num_q, block_size)[:, None]
    if samples >= block_size:
        tokens = first + torch.arange(block_size)
        return tokens.clamp(max=num_q - 1), tokens < num_q
    length = (num_q - first).clamp(max=block_size)
    place = torch.rand(first.shape[0], samples, generator=generator) + torch.arange(samples)
    tokens = first + torch.minimum((place * length / samples).long(), length - 1)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)

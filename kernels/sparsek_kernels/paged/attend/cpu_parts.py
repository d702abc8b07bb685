"""Parts of a token's softmax in torch and float32: keys and their weights."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.gather import block_reader
from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.plan import TileGroup
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.sample import CELL_BITS, CELL_MASK, STEPS

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys, ``[T, Hkv, G, Dv]``, 0 for a token that sees none of them, and its
log-sum-exp ``[T, Hkv, G]``."""


def blocks_and_logs(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, int64, and natural logs of their weights, float32; of no entry 0 and -inf."""
    entries = entries.long()
    there = entries >= 0
    logs = (entries >> CELL_BITS).double() * (math.log(2.0) / STEPS)
    return (entries & CELL_MASK).where(there, 0), logs.where(there, -math.inf).float()


def attend_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    softmax_scale: float,
    logs: torch.Tensor | None = None,
) -> Part:
    """Attention over gathered keys.

    Args:
        q: ``[T, Hkv, G, D]``; k, v: ``[1 or T, Hkv, n, D]``, anything where ``hidden``.
        hidden: ``[1 or T, 1 or Hkv, n]`` bool.
        logs: ``[T, Hkv, n]``, natural logs of the keys' weights; ``None``: 0.
    """
    k, v = k.float(), v.float()
    logits = torch.matmul(q.float() * softmax_scale, k.mT)
    if logs is not None:
        logits += logs.unsqueeze(2)
    logits = logits.masked_fill(hidden.unsqueeze(2), float("-inf"))
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num(0.0)
    return torch.matmul(weights, v.masked_fill(hidden.unsqueeze(-1), 0.0)), lse


def attend_blocks(
    q: torch.Tensor,
    operands: PagedOperands,
    group: TileGroup,
    chosen: Chosen | None,
    rule: SelectionPolicy,
    here: HeldPages | None = None,
) -> Part:
    """Attention of single tokens over chosen blocks with their weights, sinks and window.

    Args:
        q: ``[T, Hkv, G, D]``.
        here: which pages this rank holds, where several ranks have them between them.
    """
    size, heads = rule.sel_block_size, q.shape[1]
    blocks, selected = group.forced.expand(-1, heads, -1), None
    logs = torch.zeros(blocks.shape)
    if chosen is not None:
        selected, weights = blocks_and_logs(chosen.indices)
        blocks = torch.cat([selected, blocks], dim=-1)
        logs = torch.cat([weights, logs], dim=-1)
    positions = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(2)[..., : group.num_keys]
    logs = logs.repeat_interleave(size, dim=-1)[..., : group.num_keys]
    hidden = logs == -math.inf
    if here is not None:
        hidden = hidden | ~here.has(positions)
    if group.bias is not None:
        hidden = hidden | (group.bias[:, :, 0] != 0)

    def read(cache: torch.Tensor) -> torch.Tensor:
        reader = block_reader(cache, size)
        rows = reader.read(group.names(reader, selected, size)).flatten(2, 3)
        return rows[:, :, : group.num_keys]

    k, v = read(operands.k_cache), read(operands.v_cache)
    return attend_keys(q, k, v, hidden, operands.softmax_scale, logs)

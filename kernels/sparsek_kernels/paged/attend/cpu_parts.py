"""Parts of a token's softmax in torch and float32: keys, and what stands in for others."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.chosen import Chosen, Tail
from sparsek_kernels.paged.cpu.gather import block_reader
from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.plan import TileGroup
from sparsek_kernels.paged.merge import merge_shards
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SEGMENT, SelectionPolicy
from sparsek_kernels.paged.record import view_records

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys, ``[T, Hkv, G, Dv]``, 0 for a token that sees none of them, and its
log-sum-exp ``[T, Hkv, G]``."""


def attend_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    softmax_scale: float,
) -> Part:
    """Attention over gathered keys.

    Args:
        q: ``[T, Hkv, G, D]``; k, v: ``[1 or T, Hkv, n, D]``, anything where ``hidden``.
        hidden: ``[1 or T, 1 or Hkv, n]`` bool.
    """
    k, v = k.float(), v.float()
    logits = torch.matmul(q.float() * softmax_scale, k.mT)
    logits = logits.masked_fill(hidden.unsqueeze(2), float("-inf"))
    return _attend_logits(logits, v.masked_fill(hidden.unsqueeze(-1), 0.0))


def attend_blocks(
    q: torch.Tensor,
    operands: PagedOperands,
    group: TileGroup,
    chosen: Chosen | None,
    rule: SelectionPolicy,
    here: HeldPages | None = None,
) -> Part:
    """Attention of single tokens over chosen blocks, sinks, window, and the tail of the others.

    Args:
        q: ``[T, Hkv, G, D]``.
        here: which pages this rank holds, where several ranks have them between them.
    """
    size, heads = rule.sel_block_size, q.shape[1]
    selected, tail = (None, None) if chosen is None else (chosen.indices.long(), chosen.tail)
    blocks = group.forced.expand(-1, heads, -1)
    if selected is not None:
        blocks = torch.cat([selected, blocks], dim=-1)
    positions = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(2)[..., : group.num_keys]
    hidden = torch.zeros_like(positions, dtype=torch.bool) if here is None else ~here.has(positions)
    if group.bias is not None:
        hidden |= group.bias[:, :, 0] != 0

    def read(cache: torch.Tensor) -> torch.Tensor:
        reader = block_reader(cache, size)
        rows = reader.read(group.names(reader, selected, size)).flatten(2, 3)
        return rows[:, :, : group.num_keys]

    near = attend_keys(
        q, read(operands.k_cache), read(operands.v_cache), hidden, operands.softmax_scale
    )
    if tail is None:
        return near
    far = attend_tail(tail, operands, group, rule, here)
    outs, lses = (torch.stack(parts) for parts in zip(near, far, strict=True))
    return merge_shards(outs, lses), lses.logsumexp(0)


def attend_tail(
    tail: Tail,
    operands: PagedOperands,
    group: TileGroup,
    policy: SelectionPolicy,
    here: HeldPages | None = None,
) -> Part:
    """Attention over one more key for each segment between sinks and window.

    Args:
        tail: with the logits of the group's tokens.
        operands: whose pages keep the records.
        group: the tokens, each a tile of its own.
        policy: theirs.
        here: which pages this rank holds, where several ranks have them between them.
    """
    size, per_page = policy.sel_block_size, operands.page_size // SEGMENT
    begin = policy.sink_blocks * size // SEGMENT
    ends = group.forced[:, 0, policy.sink_blocks] * size // SEGMENT  # [T], where windows begin
    segments = torch.arange(begin, max(int(ends.max()), begin))
    pages = group.table[:, segments // per_page]
    dim = operands.k_cache.shape[3]
    records = view_records(tail.records, operands.page_size, dim)[pages, :, segments % per_page]
    means = read_value_means(records, dim).transpose(1, 2)
    hidden = (segments >= ends[:, None]).unsqueeze(1)  # [T, 1, S]
    if here is not None:
        hidden = hidden | ~here.has((segments * SEGMENT).expand_as(hidden))
    logits = tail.logits[..., begin : begin + len(segments)].unflatten(1, (operands.heads, -1))
    logits = (logits * math.log(2)).masked_fill(hidden.unsqueeze(2), float("-inf"))
    return _attend_logits(logits, means.masked_fill(hidden.unsqueeze(-1), 0.0))


def _attend_logits(logits: torch.Tensor, values: torch.Tensor) -> Part:
    """Softmax of ``[T, Hkv, G, n]`` natural logits over ``[1 or T, Hkv, n, Dv]`` values."""
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num(0.0)
    return torch.matmul(weights, values), lse

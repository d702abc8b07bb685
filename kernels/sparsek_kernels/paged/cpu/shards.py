"""Decoding over the pages of one rank, in torch: shared selection, partial output, log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cpu.gather import RunReader, block_reader
from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.plan import TileGroup, plan_decodes
from sparsek_kernels.paged.cpu.select import select_decodes
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy


def attend_shard_eager(
    operands: PagedOperands,
    batch: PagedBatch,
    rule: SelectionPolicy,
    largest: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Torch form of :func:`sparsek_kernels.paged.attend_shard`; writes ``operands.out``.

    Args:
        rule: per token.

    Returns:
        ``[T, Hq]`` float32 log-sum-exp.
    """
    heads, page_size = operands.k_cache.shape[1:3]
    q, out = (x.unflatten(1, (heads, -1)) for x in (operands.q, operands.out))
    lse = torch.full(q.shape[:3], float("-inf"))
    out.zero_()
    plan = plan_decodes(batch, rule, page_size)
    for request, begin, end, length in plan.dense:
        rows = slice(begin, end)
        table = batch.block_table[request, : -(-length // page_size)]
        out[rows], lse[rows] = _attend_everything(q[rows], operands, table, length)
    if plan.group is not None:
        held = (batch.block_table >= 0).index_select(0, plan.requests)
        here = HeldPages(held, page_size, largest)
        rows = q.index_select(0, plan.rows)
        selected = select_decodes(rows, operands, plan, rule, here)
        out[plan.rows], lse[plan.rows] = _attend_blocks(
            rows, operands, plan.group, selected, rule, here
        )
    return lse.flatten(1)


def _attend_everything(
    q: torch.Tensor, operands: PagedOperands, table: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a sequence's last queries ``q [n, Hkv, G, D]`` over this rank's pages of it."""
    page_size = operands.k_cache.shape[2]
    logical = (table >= 0).nonzero()[:, 0]
    pages = table[logical].long()
    positions = (logical[:, None] * page_size + torch.arange(page_size)).flatten()

    def read(cache: torch.Tensor) -> torch.Tensor:
        reader = RunReader(cache, page_size)
        return reader.read(reader.locate(pages.view(1, 1, -1))).flatten(2, 3)

    where = length - q.shape[0] + torch.arange(q.shape[0])
    hidden = positions > where[:, None]
    return _attend_keys(
        q, read(operands.k_cache), read(operands.v_cache), hidden[:, None], operands.softmax_scale
    )


def _attend_blocks(
    q: torch.Tensor,
    operands: PagedOperands,
    group: TileGroup,
    selected: torch.Tensor | None,
    rule: SelectionPolicy,
    here: HeldPages,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of single tokens ``q [T, Hkv, G, D]`` over the blocks that this rank holds."""
    size, heads = rule.sel_block_size, q.shape[1]
    blocks = group.forced.expand(-1, heads, -1)
    if selected is not None:
        blocks = torch.cat([selected, blocks], dim=-1)
    positions = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(2)[..., : group.num_keys]
    hidden = ~here.has(positions)
    if group.bias is not None:
        hidden |= group.bias[:, :, 0] != 0

    def read(cache: torch.Tensor) -> torch.Tensor:
        reader = block_reader(cache, size)
        rows = reader.read(group.names(reader, selected, size)).flatten(2, 3)
        return rows[:, :, : group.num_keys]

    return _attend_keys(
        q, read(operands.k_cache), read(operands.v_cache), hidden, operands.softmax_scale
    )


def _attend_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32 over gathered keys, and its log-sum-exp.

    Args:
        q: ``[T, Hkv, G, D]``; k, v: ``[1 or T, Hkv, n, D]``, anything where ``hidden``.
        hidden: ``[T, 1 or Hkv, n]`` bool.

    Returns:
        ``[T, Hkv, G, Dv]``, 0 for a token that sees no key, and ``[T, Hkv, G]``.
    """
    k, v = k.float(), v.float()
    logits = torch.matmul(q.float() * softmax_scale, k.mT)
    logits = logits.masked_fill(hidden.unsqueeze(2), float("-inf"))
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num(0.0)
    return torch.matmul(weights, v.masked_fill(hidden.unsqueeze(-1), 0.0)), lse

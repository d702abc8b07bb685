"""Decoding over the pages of one rank, in torch: partial output and log-sum-exp."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.attend.cpu_parts import attend_keys, attend_tail
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.gather import RunReader, block_reader
from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.plan import TileGroup, plan_decodes
from sparsek_kernels.paged.merge import merge_shards
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy


def attend_segment(operands: PagedOperands, segment: Segment, chosen: Chosen | None) -> None:
    """Attend decodes over this rank's pages; writes ``operands.out`` and ``operands.lse``."""
    batch, policy, lse = segment.batch, segment.policy, operands.lse
    if lse is None:
        raise ValueError("lse: expected a tensor where ranks share a context, got None")
    heads, page_size = operands.heads, operands.page_size
    q, out, lse = (x.unflatten(1, (heads, -1)) for x in (operands.q, operands.out, lse))
    plan = plan_decodes(batch, policy, page_size)
    for request, begin, end, length in plan.dense:
        rows = slice(begin, end)
        table = batch.block_table[request, : -(-length // page_size)]
        out[rows], lse[rows] = _attend_everything(q[rows], operands, table, length)
    if plan.group is not None:
        held = (batch.block_table >= 0).index_select(0, plan.requests)
        mine = None if chosen is None else chosen.of_tiles(plan.rows, plan.lists)
        out[plan.rows], lse[plan.rows] = _attend_blocks(
            q.index_select(0, plan.rows),
            operands,
            plan.group,
            mine,
            policy,
            HeldPages(held, page_size),
        )


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
    return attend_keys(
        q, read(operands.k_cache), read(operands.v_cache), hidden[:, None], operands.softmax_scale
    )


def _attend_blocks(
    q: torch.Tensor,
    operands: PagedOperands,
    group: TileGroup,
    chosen: Chosen | None,
    rule: SelectionPolicy,
    here: HeldPages,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of single tokens ``q [T, Hkv, G, D]`` over the blocks that this rank holds."""
    size, heads = rule.sel_block_size, q.shape[1]
    selected, tail = (None, None) if chosen is None else (chosen.indices.long(), chosen.tail)
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

    near = attend_keys(
        q, read(operands.k_cache), read(operands.v_cache), hidden, operands.softmax_scale
    )
    if tail is None:
        return near
    far = attend_tail(tail, operands, group, rule, here)
    outs, lses = (torch.stack(parts) for parts in zip(near, far, strict=True))
    return merge_shards(outs, lses), lses.logsumexp(0)

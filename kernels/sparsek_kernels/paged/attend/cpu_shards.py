"""Decoding over the pages of one rank, in torch: partial output and log-sum-exp."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.attend.cpu_parts import attend_blocks, attend_keys
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.gather import RunReader
from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.plan import plan_decodes
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


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
        mine = None if chosen is None else chosen.of_tiles(plan.lists)
        out[plan.rows], lse[plan.rows] = attend_blocks(
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

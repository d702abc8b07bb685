"""Launching what writes the records of the segments that some tokens complete."""

from __future__ import annotations

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.page_records.kernels.write import write_records_kernel
from sparsek_kernels.paged.policy import SEGMENT, ceil_div
from sparsek_kernels.paged.record import view_records

ALONE = 1024
"""Tokens up to which each has a program; beyond, most are a prompt's, of which one in 64 counts."""


def write_records(k_cache: torch.Tensor, k_summary: torch.Tensor, slots: torch.Tensor) -> None:
    """Triton form of :func:`write_records_eager`."""
    _, heads, page_size, dim = k_cache.shape
    records = view_records(k_summary, page_size, dim)
    block_q = next_power_of_2(dim // 4)
    tokens = slots.shape[0]
    if not tokens:
        return
    together = 1 if tokens <= ALONE else SEGMENT
    run(
        write_records_kernel, (ceil_div(tokens, together), heads),
        records, k_cache, slots, tokens, *records.stride()[:3], *k_cache.stride()[:3],
        HEAD_DIM=dim, BLOCK_Q=block_q, PAGE_SIZE=page_size, TOKENS=together,
        num_warps=record_warps(k_cache),
    )  # fmt: skip


def record_warps(k_cache: torch.Tensor) -> int:
    """Warps that write a record: a thread has 16 bytes of each quarter of a row.

    All kernels that write records have as many, and so add up in one order.
    """
    bytes_of_quarter = next_power_of_2(k_cache.shape[3] // 4) * k_cache.element_size()
    return min(max(bytes_of_quarter // 16, 1), 8)

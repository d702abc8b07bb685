"""Launching what writes the records of the segments that a step completes."""

from __future__ import annotations

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.page_records.kernels.write import write_records_kernel
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.record import SEGMENT, view_records


def write_records(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_summary: torch.Tensor, batch: PagedBatch
) -> None:
    """Triton form of :meth:`PageRecords.write`."""
    _, heads, page_size, dim = k_cache.shape
    records = view_records(k_summary, page_size, dim)
    block_q = next_power_of_2(dim // 4)
    for part, most_tokens in batch.phases():
        run(
            write_records_kernel,
            (ceil_div(most_tokens, SEGMENT), heads, part.num_requests),
            records,
            k_cache,
            v_cache,
            part.block_table,
            part.seq_lens,
            part.cu_seqlens_q,
            *records.stride()[:3],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            part.block_table.stride(0),
            HEAD_DIM=dim,
            BLOCK_Q=block_q,
            PAGE_SIZE=page_size,
            # A thread has 16 bytes of each quarter of a row.
            num_warps=min(max(block_q * k_cache.element_size() // 16, 1), 8),
        )

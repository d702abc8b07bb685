"""What decoded tokens attend by records, in float64."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.index.page_records.reference import choose_reference
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import attend_reference, gather_sequence


def decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[T, Hq, D]`` float64: attention of a batch of decodes."""
    rows, row = [], 0
    for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True)):
        k = gather_sequence(k_cache, batch.block_table[request], length)
        v = gather_sequence(v_cache, batch.block_table[request], length)
        queries, row = q[row : row + count], row + count
        if not count:
            continue
        start, key = length - count, torch.arange(length)
        causal = key <= torch.arange(start, length)[:, None]
        visible = causal.unsqueeze(1).repeat(1, k.shape[1], 1)
        tail = None
        found = choose_reference(queries, k, v, start, policy, softmax_scale)
        if found is not None:
            chosen, logits, values = found
            cell = key // policy.sel_block_size
            first, last = policy.candidate_range(start)
            for head, cells in enumerate(chosen):
                far = torch.isin(cell, torch.tensor(cells))
                visible[:, head] &= (cell < first) | (cell >= last) | far
            tail = logits, values
        rows.append(attend_reference(queries, k, v, visible, softmax_scale, sinks, tail=tail))
    return torch.cat(rows)

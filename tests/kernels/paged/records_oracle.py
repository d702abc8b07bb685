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
        for position in range(length - count, length):
            key = torch.arange(length)
            visible = (key <= position).expand(1, k.shape[1], length).clone()
            tail = None
            found = choose_reference(q[row], k, v, position, policy, softmax_scale)
            if found is not None:
                chosen, logits, values = found
                cell = key // policy.sel_block_size
                first, last = policy.candidate_range(position)
                for head, cells in enumerate(chosen):
                    far = torch.isin(cell, torch.tensor(cells))
                    visible[0, head] &= (cell < first) | (cell >= last) | far
                tail = logits[None], values
            rows.append(
                attend_reference(q[row : row + 1], k, v, visible, softmax_scale, sinks, tail=tail)
            )
            row += 1
    return torch.cat(rows)

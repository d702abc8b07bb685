"""What decoded tokens attend by records, in float64."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import attend_by_records_reference, gather_sequence


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
        k, v = (gather_sequence(x, batch.block_table[request], length) for x in (k_cache, v_cache))
        if count:
            rows.append(
                attend_by_records_reference(
                    q[row : row + count], k, v, length - count, policy, softmax_scale, sinks
                )
            )
        row += count
    return torch.cat(rows)

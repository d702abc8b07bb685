"""What decoded tokens attend by records, in float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparsek_kernels.paged.attend.reference import Select
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.index.page_records.reference import choose_reference
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import (
    attend_by_records_reference,
    gather_sequence,
    select_blocks_reference,
)
from sparsek_kernels.paged.sample_reference import list_error


def checked_lists(
    lists: Iterable[torch.Tensor], tolerance: float, others: Select = select_blocks_reference
) -> Select:
    """What takes some path's own lists, after :func:`list_error`, in place of the oracle's.

    Args:
        lists: ``[Hkv, places]`` of each request that decodes, or prompt's token, in order.
        tolerance: most relative error of a score.
        others: what chooses by policies without an alignment.
    """
    each = iter(lists)

    def select(
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> list[list[int]] | None:
        if not policy.alignment:
            return others(q, k, positions, policy, softmax_scale)
        mine = next(each).tolist()
        found = choose_reference(q, k[: positions[-1] + 1], positions[0], policy, softmax_scale)
        if found is None:
            assert {entry for entries in mine for entry in entries} == {-1}
            return None
        wrong = [list_error(found, head, entries, tolerance) for head, entries in enumerate(mine)]
        assert not any(wrong), wrong
        return mine

    return select


def decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    policy: SelectionPolicy,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    select: Select = select_blocks_reference,
) -> torch.Tensor:
    """``[T, Hq, D]`` float64: attention of a batch of decodes."""
    rows, row = [], 0
    for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True)):
        k, v = (gather_sequence(x, batch.block_table[request], length) for x in (k_cache, v_cache))
        if count:
            mine, start = q[row : row + count], length - count
            found = (mine, k, v, start, policy, softmax_scale, sinks, select)
            rows.append(attend_by_records_reference(*found))
        row += count
    return torch.cat(rows)

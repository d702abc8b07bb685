"""Records of the segments that a step completes, in torch."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cpu.native import records as native_records
from sparsek_kernels.paged.index.cpu import completed_blocks
from sparsek_kernels.paged.policy import SEGMENT
from sparsek_kernels.paged.record import encode, view_records

_SEGMENTS = 32
"""Segments that are encoded at once: bounds scratch."""


def write_records_eager(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_summary: torch.Tensor, batch: PagedBatch
) -> None:
    """Torch form of :meth:`PageRecords.write`."""
    page_size, dim = k_cache.shape[2:]
    records = view_records(k_summary, page_size, dim)
    requests, segments = completed_blocks(batch, SEGMENT)
    pages = batch.block_table[requests, segments * SEGMENT // page_size].long()
    places = segments % (page_size // SEGMENT)
    here = pages >= 0  # not on another rank
    if native_records.supports(k_cache, v_cache, k_summary):
        named = pages * (page_size // SEGMENT) + places
        native_records.write_records(k_cache, v_cache, k_summary, named[here])
        return
    keys, values = (x.unflatten(2, (-1, SEGMENT)) for x in (k_cache, v_cache))
    for page, place in zip(
        pages[here].split(_SEGMENTS), places[here].split(_SEGMENTS), strict=True
    ):
        records[page, :, place] = encode(keys[page, :, place], values[page, :, place])

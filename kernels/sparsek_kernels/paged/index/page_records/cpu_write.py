"""Records of the segments that some tokens complete, on a CPU."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.cpu.native import records as native_records
from sparsek_kernels.paged.policy import SEGMENT
from sparsek_kernels.paged.record import encode, view_records

_SEGMENTS = 32
"""Segments that are encoded at once: bounds scratch."""


def write_records_eager(
    k_cache: torch.Tensor, k_summary: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the records of the segments that end at some slots.

    Args:
        k_cache: ``[num_pages, Hkv, page_size, D]``, the slots' rows included.
        k_summary: ``[num_pages, Hkv, bytes]``, written.
        slots: ``[T]`` int64, none twice; -1 marks padding.
    """
    page_size, dim = k_cache.shape[2:]
    records = view_records(k_summary, page_size, dim)
    segments = slots[slots % SEGMENT == SEGMENT - 1] // SEGMENT
    segments = segments[segments >= 0]
    if native_records.supports(k_cache, k_summary):
        native_records.write_records(k_cache, k_summary, segments)
        return
    keys = k_cache.unflatten(2, (-1, SEGMENT))
    for some in segments.split(_SEGMENTS):
        page, place = some // keys.shape[2], some % keys.shape[2]
        records[page, :, place] = encode(keys[page, :, place])

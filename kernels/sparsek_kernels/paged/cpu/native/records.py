"""The records of complete segments by one C function: ``record.py`` has their table."""

from __future__ import annotations

from struct import Struct

import torch

from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.policy import SEGMENT

_MOST_DIM = 512
_ARGUMENTS = Struct("@5q q 5q 3q")
"""``Records`` of ``records.c``: sizes, the segments, rows of K, the records."""


def supports(k_cache: torch.Tensor, k_summary: torch.Tensor) -> bool:
    """Whether the C function writes these records; the torch path does where it does not."""
    return (
        k_cache.dtype in (torch.bfloat16, torch.float32)
        and k_cache.shape[2] % SEGMENT == 0
        and k_cache.shape[3] % 8 == 0
        and k_cache.shape[3] <= _MOST_DIM
        and k_cache.stride(-1) == k_summary.stride(-1) == 1
        and build.library() is not None
    )


def write_records(k_cache: torch.Tensor, k_summary: torch.Tensor, segments: torch.Tensor) -> None:
    """Write the records of some segments, whose keys are in the cache, to ``k_summary``.

    ``segments [n]`` int64, none twice, are ``page * (page_size // 64)`` plus the place in the page.
    """
    built = build.library()
    if built is None:
        raise RuntimeError("write_records: expected a C compiler, found none; ask supports() first")
    _, heads, page_size, dim = k_cache.shape
    if not segments.numel():
        return
    segments = segments.contiguous()
    arguments = _ARGUMENTS.pack(
        segments.numel(), heads, dim, page_size // SEGMENT, torch.get_num_threads(),
        segments.data_ptr(),
        k_cache.data_ptr(), *k_cache.stride()[:3], k_cache.dtype == torch.bfloat16,
        k_summary.data_ptr(), *k_summary.stride()[:2],
    )  # fmt: skip
    built.sparsek_records(arguments)

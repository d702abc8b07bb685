"""Pages as the kernels for Hopper address them: one matrix, read by tensor descriptors."""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek_kernels.common.alignment import copyable
from sparsek_kernels.common.descriptors import describe_matrix
from sparsek_kernels.common.device import device_arch
from sparsek_kernels.paged.config import has_wgmma

BOX = 64
"""Rows of a tensor descriptor's box, and its columns."""
_LAST_ROW = 0x70000000


def tensor_cores_take(q: torch.Tensor, keys: torch.Tensor, page_size: int) -> bool:
    return (
        has_wgmma(device_arch(q.device))
        and q.dtype in (torch.float16, torch.bfloat16)
        and keys.dtype == q.dtype
        and q.shape[2] in (64, 128)
        and page_size % BOX == 0
        and copyable(q, keys)
    )


def is_matrix(cache: torch.Tensor) -> bool:
    """Whether ``[P, H, page_size, D]`` pages lie at multiples of a row of one matrix."""
    page, _head, row, _ = cache.stride()
    return row > 0 and page % row == 0 and _matrix(cache)[0] < _LAST_ROW


def _matrix(cache: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows in all, rows from page to page, rows and columns from head to head."""
    pages, heads, page_size, _ = cache.shape
    page, head, row, _ = cache.stride()
    head_rows, head_cols = (head // row, 0) if head % row == 0 else (0, head)
    rows = (pages - 1) * (page // row) + (heads - 1) * head_rows + page_size
    return rows, page // row, head_rows, head_cols


def describe_cache(cache: torch.Tensor) -> tuple[TensorDescriptor, int, int, int]:
    rows, page_rows, head_rows, head_cols = _matrix(cache)
    columns = (cache.shape[1] - 1) * head_cols + cache.shape[3]
    descriptor = describe_matrix(cache, (rows, columns), cache.stride(2), (BOX, BOX))
    return descriptor, page_rows, head_rows, head_cols

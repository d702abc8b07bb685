"""Descriptors for Hopper's bulk copies (TMA), and how tiles lie in shared memory."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek_kernels.common.alignment import columns_of

_ELEMENT = {
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
    torch.float32: triton.language.float32,
}


@lru_cache(maxsize=64)
def tile_layout(rows: int, cols: int, dtype: torch.dtype) -> NVMMASharedLayout:
    """Shared-memory layout in which tensor cores read a tile ``[rows, cols]``."""
    return NVMMASharedLayout.get_default_for([rows, cols], _ELEMENT[dtype])


def describe_matrix(
    x: torch.Tensor, shape: tuple[int, int], stride: int, tile: tuple[int, int]
) -> TensorDescriptor:
    """Descriptor of tiles of the matrix ``shape`` whose rows lie ``stride`` elements apart."""
    layout = tile_layout(*tile, x.dtype)
    return TensorDescriptor(x, list(shape), [stride, 1], list(tile), layout)


def describe(
    x: torch.Tensor, rows: int, cols: int | None = None
) -> tuple[TensorDescriptor, int, int]:
    """``(descriptor, rows per sequence, columns per head)`` of ``x [B, N, H, D]`` as a matrix.

    A tile is ``rows`` tokens of one head, or ``cols`` columns of it.
    """
    batch, tokens, _, dim = x.shape
    cols = cols or dim
    batch_rows = x.stride(0) // x.stride(1) if batch > 1 else 0
    shape = ((batch - 1) * batch_rows + tokens, columns_of(x))
    return describe_matrix(x, shape, x.stride(1), (rows, cols)), batch_rows, x.stride(2)


@lru_cache(maxsize=8)
def box_layout(dtype: torch.dtype) -> NVMMASharedLayout:
    """Shared-memory layout of the boxes of :func:`describe_boxes`: swizzled over 64 columns."""
    return NVMMASharedLayout.get_default_for([1, 8, 1, 64], _ELEMENT[dtype])


def describe_boxes(x: torch.Tensor, tokens: int, heads: int, cols: int) -> TensorDescriptor:
    """Descriptor of boxes ``[1, tokens, heads, cols]`` of ``x [B, N, H, D]``, 16-bit elements."""
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride(), strict=False)]
    box = [1, tokens, heads, cols]
    return TensorDescriptor(x, x.shape, [*strides, 1], box, box_layout(x.dtype))

"""Descriptors for Hopper's bulk copies (TMA): which tensors have them, and how tiles are named."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_ELEMENT = {
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
    torch.float32: triton.language.float32,
}


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU: the programs of a persistent grid."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def describable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address each ``[B, N, H, D]`` tensor as one matrix."""
    for x in tensors:
        step = 16 // x.element_size()
        batch, tokens, head, _ = x.stride()
        if x.stride(3) != 1 or x.data_ptr() % 16 or tokens % step or head % step or tokens == 0:
            return False
        if x.shape[0] > 1 and batch % tokens:
            return False
    return True


def tile_layout(rows: int, cols: int, dtype: torch.dtype) -> NVMMASharedLayout:
    """How tensor cores want a tile ``[rows, cols]`` to lie in shared memory."""
    return NVMMASharedLayout.get_default_for([rows, cols], _ELEMENT[dtype])


def describe(
    x: torch.Tensor, rows: int, cols: int | None = None
) -> tuple[TensorDescriptor, int, int]:
    """Descriptor of tiles of ``rows`` tokens of one head, or of ``cols`` of its columns.

    Returns it, the rows per sequence and the columns per head.
    """
    batch, tokens, heads, dim = x.shape
    cols = cols or dim
    batch_rows = x.stride(0) // x.stride(1) if batch > 1 else 0
    shape = [(batch - 1) * batch_rows + tokens, (heads - 1) * x.stride(2) + dim]
    layout = tile_layout(rows, cols, x.dtype)
    descriptor = TensorDescriptor(x, shape, [x.stride(1), 1], [rows, cols], layout)
    return descriptor, batch_rows, x.stride(2)


def boxable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address each ``[B, N, H, D]`` tensor as it is."""
    return all(
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s * x.element_size() % 16 == 0)
                for n, s in zip(x.shape[:3], x.stride(), strict=False))
        for x in tensors
    )  # fmt: skip


def box_layout(dtype: torch.dtype) -> NVMMASharedLayout:
    """How boxes of :func:`describe_boxes`, wide enough to be swizzled, lie in shared memory."""
    return NVMMASharedLayout.get_default_for([1, 8, 1, 64], _ELEMENT[dtype])


def describe_boxes(x: torch.Tensor, tokens: int, heads: int, cols: int) -> TensorDescriptor:
    """Descriptor of boxes ``[1, tokens, heads, cols]`` of ``x [B, N, H, D]``, 16-bit elements."""
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride(), strict=False)]
    box = [1, tokens, heads, cols]
    return TensorDescriptor(x, x.shape, [*strides, 1], box, box_layout(x.dtype))

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


def describe(x: torch.Tensor, rows: int) -> tuple[TensorDescriptor, int, int]:
    """Descriptor of tiles of ``rows`` tokens of one head; rows per sequence, columns per head."""
    batch, tokens, heads, dim = x.shape
    batch_rows = x.stride(0) // x.stride(1) if batch > 1 else 0
    shape = [(batch - 1) * batch_rows + tokens, (heads - 1) * x.stride(2) + dim]
    layout = NVMMASharedLayout.get_default_for([rows, dim], _ELEMENT[x.dtype])
    descriptor = TensorDescriptor(x, shape, [x.stride(1), 1], [rows, dim], layout)
    return descriptor, batch_rows, x.stride(2)

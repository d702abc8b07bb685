"""The sketch of written keys by one C function; every byte is as ``sketch.py`` computes it."""

from __future__ import annotations

import ctypes

import torch

from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.index.key_means.sketch import rotation_size

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of keys, by the numbers that ``sketch.c`` gives them."""


class _Sketch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("slots_count", "heads", "dim", "page_size")),
        *((name, ctypes.c_int64) for name in ("dtype", "rotated")),
        ("norm", ctypes.c_double),
        ("slots", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_page", "key_head", "key_row")),
        ("sketch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sketch_page", "sketch_head")),
    )


def supports(k_cache: torch.Tensor, k_summary: torch.Tensor) -> bool:
    """Whether the C function sketches these keys; the torch path does where it does not."""
    return (
        k_cache.dtype in _DTYPES
        and k_cache.stride(-1) == k_summary.stride(-1) == 1
        and build.library() is not None
    )


def sketch_slots(k_cache: torch.Tensor, k_summary: torch.Tensor, slots: torch.Tensor) -> None:
    """Sketch the vectors that some slots lie in, from the keys in the cache.

    Args:
        k_cache: ``[num_pages, Hkv, page_size, D]``.
        k_summary: ``[num_pages, Hkv, summary_bytes]``, written.
        slots: ``[T]`` int64, none negative; neighbours of one vector in order.
    """
    built = build.library()
    if built is None:
        raise RuntimeError("sketch_slots: expected a C compiler, found none; ask supports() first")
    _, heads, page_size, dim = k_cache.shape
    slots = slots.contiguous()
    size = rotation_size(dim)
    arguments = _Sketch(
        slots.numel(),
        heads,
        dim,
        page_size,
        _DTYPES.index(k_cache.dtype),
        size,
        size**-0.5,
        slots.data_ptr(),
        k_cache.data_ptr(),
        *k_cache.stride()[:3],
        k_summary.data_ptr(),
        *k_summary.stride()[:2],
    )
    built.sparsek_sketch(ctypes.addressof(arguments))

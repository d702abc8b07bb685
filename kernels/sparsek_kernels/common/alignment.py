"""Which tensors the copy instructions of a GPU can address without a copy made first."""

from __future__ import annotations

import torch

MOST_COLUMNS = (1 << 31) - 1
"""Columns of a matrix at most: coordinates of a bulk copy have 32 bits, one of them the sign."""


def copyable(*tensors: torch.Tensor) -> bool:
    """Whether copies of 16 bytes fit the contiguous rows of each ``[..., D]`` tensor."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and not any(s * x.element_size() % 16 for s in x.stride()[:-1])
        for x in tensors
    )


def describable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address each ``[B, N, H, D]`` tensor as one matrix.

    A long sequence head by head has too many columns.
    """
    for x in tensors:
        step = 16 // x.element_size()
        batch, tokens, head, _ = x.stride()
        if x.stride(3) != 1 or x.data_ptr() % 16 or tokens % step or head % step or tokens == 0:
            return False
        if columns_of(x) > MOST_COLUMNS or (x.shape[0] > 1 and batch % tokens):
            return False
    return True


def columns_of(x: torch.Tensor) -> int:
    """Columns of the matrix that has the heads of ``[..., H, D]`` side by side."""
    heads, dim = x.shape[-2:]
    return (heads - 1) * x.stride(-2) + dim


def boxable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address each ``[B, N, H, D]`` tensor as it is."""
    return all(
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s * x.element_size() % 16 == 0)
                for n, s in zip(x.shape[:3], x.stride(), strict=False))
        for x in tensors
    )  # fmt: skip

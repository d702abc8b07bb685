"""Which tensors the copy instructions of a GPU can address without a copy made first."""

from __future__ import annotations

import torch


def copyable(*tensors: torch.Tensor) -> bool:
    """Whether copies of 16 bytes fit the contiguous rows of each ``[..., D]`` tensor."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and not any(s * x.element_size() % 16 for s in x.stride()[:-1])
        for x in tensors
    )


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


def boxable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address each ``[B, N, H, D]`` tensor as it is."""
    return all(
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s * x.element_size() % 16 == 0)
                for n, s in zip(x.shape[:3], x.stride(), strict=False))
        for x in tensors
    )  # fmt: skip

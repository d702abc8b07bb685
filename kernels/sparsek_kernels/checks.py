"""Argument checks that name the argument, what was expected and what came."""

from __future__ import annotations

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Check rank, fixed sizes (the integers of ``shape``), dtype and device of a tensor.

    Raises:
        TypeError: ``value`` is no tensor, or its dtype is not one of ``dtypes``.
        ValueError: rank, a size or the device differs.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    matches = value.dim() == len(shape)
    if matches:
        for size, have in zip(shape, value.shape, strict=True):
            if size != have and not isinstance(size, str):
                matches = False
    if not matches:
        wanted = "[" + ", ".join(str(size) for size in shape) + "]"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(value.shape)}")
    if dtypes is not None and value.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {names}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
    return value


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head.

    Raises:
        ValueError: the KV heads do not divide the query heads.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of num_kv_heads={num_kv_heads} query heads, got {num_heads}"
        )
    return num_heads // num_kv_heads

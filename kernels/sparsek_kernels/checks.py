"""Argument checks that name the argument, what was expected and what came.

A wrong type or dtype is a TypeError, a wrong shape, device or value a ValueError, and what kernels
do not take a NotImplementedError: here and in the checks of every family.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from itertools import pairwise

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the kernels
DTYPES = (*FLOAT_DTYPES, torch.float64)  # of kernels and torch paths
MAX_HEAD_DIM = 256
_checked_offsets: MutableMapping[torch.Tensor, tuple[int, int]] = WeakTensorKeyDictionary()


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Check rank, fixed sizes (the integers of ``shape``), dtype and device of a tensor.

    One that carries a tangent of forward-mode differentiation is refused.
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
    if forward_ad.unpack_dual(value).tangent is not None:  # which operators would drop
        raise NotImplementedError(
            f"{name}: forward-mode differentiation (torch.func.jvp) is not supported; "
            "differentiate backward, or use torch's scaled_dot_product_attention"
        )
    return value


def check_query(q: object) -> torch.Tensor:
    """A query tensor ``[B, N, Hq, D]``."""
    tensor = check_tensor("q", q, ("B", "N", "Hq", "D"), DTYPES)
    if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected head_dim from 1 to {MAX_HEAD_DIM}, got {tensor.shape[3]}")
    return tensor


def check_qkv(q: object, k: object, v: object) -> None:
    """Check ``q [B, N, Hq, D]`` and ``k`` and ``v`` ``[B, M, Hkv, D]`` of one dtype and device."""
    q = check_query(q)
    batch, _, num_heads, dim = q.shape
    k = check_tensor("k", k, (batch, "M", "Hkv", dim), (q.dtype,), q.device)
    check_tensor("v", v, k.shape, (q.dtype,), q.device)
    check_heads(num_heads, k.shape[2])


def check_int(name: str, value: object, low: int) -> None:
    """Check an integer, ``low`` or more."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name}: expected an integer >= {low}, got {value}")


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor of ``q . k``, ``head_dim ** -0.5`` by default."""
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not 0.0 < scale < math.inf:  # a symbol, where torch.compile makes sizes dynamic
        raise ValueError(f"softmax_scale: expected a finite number > 0, got {softmax_scale}")
    return scale


def check_offsets(name: str, offsets: object, total: int, device: torch.device) -> None:
    """Check int32 offsets of packed sequences, which ascend from 0 to ``total``.

    Values are checked once per tensor, which waits for the device: not while compiling and not
    while a CUDA graph is captured.  A tensor that was changed in place is checked again; tensors of
    inference mode do not record such changes.
    """
    tensor = check_tensor(name, offsets, ("sequences + 1",), (torch.int32,), device)
    if tensor.shape[0] < 1:
        raise ValueError(f"{name}: expected shape [sequences + 1], got {list(tensor.shape)}")
    if torch.compiler.is_compiling():
        return
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    seen = (0 if tensor.is_inference() else tensor._version, total)
    if _checked_offsets.get(tensor) == seen:
        return
    values = tensor.tolist()
    if values[0] != 0 or values[-1] != total or any(lo > hi for lo, hi in pairwise(values)):
        raise ValueError(
            f"{name}: expected non-decreasing offsets from 0 to the token count {total}, "
            f"got {values}"
        )
    _checked_offsets[tensor] = seen


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head, of which they are a multiple."""
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of num_kv_heads={num_kv_heads} query heads, got {num_heads}"
        )
    return num_heads // num_kv_heads

"""Torch paths compute in the precision that they choose, whatever autocast says."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the softmax and of its log-sum-exp for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``function`` with autocast off for the device of its first tensor.

    Autocast reaches into the body of an operator; kernels do not notice, torch operations would
    multiply in half precision.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(x.device.type for x in args if isinstance(x, torch.Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run

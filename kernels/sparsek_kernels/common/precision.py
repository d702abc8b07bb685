"""What the torch paths share: their precision, and a softmax with its gradient."""

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
        # Devices that are compiled for have autocast; torch 2.11 cannot trace the question.
        if not (torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def softmax_(
    scores: torch.Tensor, lse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension and its log-sum-exp ``[..., 1]``; may overwrite ``scores``.

    A row of ``-inf`` gives zeros and ``-inf``.  Weights are made of a log-sum-exp only where one
    is given: that of scores of 1e9 is rounded to 64.
    """
    if lse is not None:
        return scores.sub_(lse.masked_fill(lse == float("-inf"), 0.0)).exp_(), lse
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill_(lse == float("-inf"), 0.0), lse


def row_sums(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """What the gradients of a row's scores have in common, ``[B, Hq, N]``."""
    compute = compute_dtype(dout.dtype)
    delta = (dout.to(compute) * out.to(compute)).sum(dim=3).transpose(1, 2)
    return delta if dlse is None else delta - dlse

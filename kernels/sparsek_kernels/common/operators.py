"""What the attention operators share: whether kernels run, result tensors, fakes and autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

from sparsek_kernels.checks import FLOAT_DTYPES
from sparsek_kernels.common.precision import compute_dtype


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether Triton kernels serve the device and dtype of ``x``; else torch operations do."""
    return x.is_cuda and x.dtype in FLOAT_DTYPES


def new_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised contiguous tensor with the shape, dtype and device of ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised log-sum-exp ``[B, Hq, N]`` for queries ``q [B, N, Hq, D]``."""
    batch, num_q, num_heads, _ = q.shape
    return q.new_empty((batch, num_heads, num_q), dtype=compute_dtype(q.dtype))


def pointers(stand_in: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """``tensors``, with ``stand_in`` for each absent one, which the kernel then does not read."""
    return tuple(stand_in if x is None else x for x in tensors)


def register_gradient(forward: Any, backward: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Autograd of an operator ``forward(q, k, v, *rest)``, which returns output and log-sum-exp.

    ``backward(dout, dlse, q, k, v, out, lse, *rest)`` returns the gradients of its first inputs,
    in their order.  One for an absent input is dropped.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
        ctx.save_for_backward(*output, *tensors)
        ctx.scalars = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)

    def gradients(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * len(tensors)
        dout = torch.zeros_like(out) if dout is None else dout
        inputs = zip(tensors, ctx.scalars, strict=True)
        q, k, v, *rest = (scalar if x is None else x for x, scalar in inputs)
        grads = backward(dout, dlse, q, k, v, out, lse, *rest)
        return tuple(None if x is None else grad for x, grad in zip_longest(tensors, grads))

    forward.register_autograd(gradients, setup_context=setup_context)


def register_attention(forward: Any, backward: Any) -> None:
    """Register the fakes of ``forward`` and ``backward``, and the autograd of ``forward``.

    The arguments are those of :func:`register_gradient`.  ``backward`` returns the gradients of q,
    k and v alone.
    """

    @forward.register_fake  # type: ignore[untyped-decorator]
    def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return new_like(q), new_lse(q)

    @backward.register_fake  # type: ignore[untyped-decorator]
    def _(
        dout: object, dlse: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return new_like(q), new_like(k), new_like(v)

    register_gradient(forward, backward)

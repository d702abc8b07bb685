"""What the attention operators share: whether kernels run, result tensors, fakes and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from sparsek_kernels.checks import FLOAT_DTYPES
from sparsek_kernels.common.precision import compute_dtype

Passes = tuple[Callable[..., None], Callable[..., tuple[torch.Tensor | None, ...]]]
"""``forward(problem, out, lse)`` and ``backward(problem, out, lse, dout, dlse)``, which returns
gradients."""


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether Triton kernels serve the device and dtype of ``x``; else torch operations do."""
    return x.is_cuda and x.dtype in FLOAT_DTYPES


class Direct:
    """An operator's computation and gradient, without the dispatcher.

    Each call of a ``torch.library`` operator costs the host as much as several launches.

    Args:
        implementation: takes tensors, lists of tensors and other values; returns a tuple of
            tensors, or a list, whose gradients ``backward`` then takes as one list.
        setup_context: as ``register_autograd`` takes it.
        backward: the same; with gradients enabled where a graph of it is made.
    """

    def __init__(
        self,
        implementation: Callable[..., Sequence[torch.Tensor]],
        setup_context: Callable[[Any, tuple[Any, ...], Any], None],
        backward: Callable[..., tuple[Any, ...]],
    ) -> None:
        self.implementation, self.setup_context = implementation, setup_context
        self.backward = backward

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The results, with gradients of tensors in lists too."""
        lengths = [len(x) if _is_tensor_list(x) else None for x in inputs]
        flat: list[Any] = []
        for x, length in zip(inputs, lengths, strict=True):
            flat += [x] if length is None else x
        found: tuple[torch.Tensor, ...] = _Direct.apply(self, lengths, *flat)  # type: ignore[no-untyped-call]
        return found


def _is_tensor_list(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) > 0 and isinstance(x[0], torch.Tensor)


class _Direct(torch.autograd.Function):
    """Calls a :class:`Direct` with its lists put together again."""

    @staticmethod
    def forward(
        ctx: Any, direct: Direct, lengths: list[int | None], *flat: Any
    ) -> tuple[torch.Tensor, ...]:
        rest = iter(flat)
        inputs = tuple(next(rest) if n is None else [next(rest) for _ in range(n)] for n in lengths)
        found = direct.implementation(*inputs)
        ctx.direct, ctx.lengths, ctx.is_list = direct, lengths, isinstance(found, list)
        direct.setup_context(ctx, inputs, found)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        flat: list[Any] = [None, None]
        given = ([*grads],) if ctx.is_list else grads
        for grad, length in zip(ctx.direct.backward(ctx, *given), ctx.lengths, strict=True):
            flat += [grad] if length is None else grad
        return tuple(flat)


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


def make_contiguous(problem: object, *names: str) -> None:
    """Copy these tensors of a frozen problem, where there are any, unless they are contiguous."""
    for name in names:
        x = getattr(problem, name)
        object.__setattr__(problem, name, None if x is None else x.contiguous())


def attention_operators(
    name: str,
    rest: str,
    problem: Callable[..., Any],
    passes: Callable[[torch.Tensor], Passes],
    gradients: int = 3,
    keeps: Callable[..., torch.Tensor] | None = None,
) -> tuple[CustomOpDef, CustomOpDef]:
    """Operators ``sparsek::{name}_fwd`` and ``sparsek::{name}_bwd``, with fakes and autograd.

    The first takes ``q [B, N, Hq, D]``, k, v and ``rest``, and returns the output ``[B, N, Hq, D]``
    and the log-sum-exp ``[B, Hq, N]``, both differentiable.  The second takes their gradients, q, k
    and v, both results and ``rest``, and returns the gradients of the first of these inputs: empty
    ones for absent inputs.

    Args:
        rest: further inputs, as schemas have them.
        problem: makes the problem of a call from q, k, v and ``rest``.
        passes: what computes it on the device and in the dtype of q.
        gradients: inputs that have one.
        keeps: makes, from the inputs, room for what the first keeps for the second: its third
            result, which the second takes last.  Problems take it after ``rest``.
    """
    more = "" if keeps is None else ", Tensor kept"
    fwd_schema = f"(Tensor q, Tensor k, Tensor v, {rest}) -> (Tensor out, Tensor lse{more})"
    results = ", ".join(["Tensor"] * gradients)
    bwd_schema = (
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{rest}{more}) -> ({results})"
    )

    def room(q: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return (new_like(q), new_lse(q)) + (() if keeps is None else (keeps(q, *inputs),))

    @torch.library.custom_op(f"sparsek::{name}_fwd", mutates_args=(), schema=fwd_schema)
    def forward(q: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
        out, lse, *kept = found = room(q, *inputs)
        with torch.cuda.device_of(q):
            passes(q)[0](problem(q, *inputs, *kept), out, lse)
        return found

    forward.register_fake(room)

    @torch.library.custom_op(f"sparsek::{name}_bwd", mutates_args=(), schema=bwd_schema)
    def backward(
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        with torch.cuda.device_of(q):
            found = passes(q)[1](problem(q, k, v, *rest), out, lse.contiguous(), dout, dlse)
        return tuple(q.new_empty(0) if x is None else x for x in found)

    @backward.register_fake
    def _(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> Any:
        first = (q, k, v, *rest)[:gradients]
        return tuple(q.new_empty(0) if x is None else new_like(x) for x in first)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
        ctx.save_for_backward(*output, *tensors)
        ctx.mark_non_differentiable(*output[2:])
        ctx.scalars = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        saved, count = ctx.saved_tensors, len(ctx.scalars)
        (out, lse, *kept), tensors = saved[:-count], saved[-count:]
        if dout is None and dlse is None:
            return (None,) * len(tensors)
        dout = torch.zeros_like(out) if dout is None else dout
        inputs = zip(tensors, ctx.scalars, strict=True)
        q, k, v, *rest = (scalar if x is None else x for x, scalar in inputs)
        grads = backward(dout, dlse, q, k, v, out, lse, *rest, *kept)
        return tuple(None if x is None else grad for x, grad in zip_longest(tensors, grads))

    forward.register_autograd(differentiate, setup_context=setup_context)
    return forward, backward

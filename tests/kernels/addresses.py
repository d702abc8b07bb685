"""Triton's interpreter, whose kernels may touch nothing but the tensors that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton import knobs
from triton.runtime import interpreter


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, tuple):
        for one in given:
            yield from _tensors(one)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends, in bytes: a view ends with its own last element."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class _Kernel:
    """The kernel that runs, and where its tensors are."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        spans = sorted(_span(x) for x in _tensors(given) if x.numel())
        self.begins = np.array([begin for begin, _ in spans], np.uint64)
        ends = np.array([end for _, end in spans], np.uint64)
        self.ends = np.maximum.accumulate(ends)  # a tensor may lie within another one

    def check(self, pointers: Any, mask: Any) -> None:
        """Raise where a pointer that is not masked out leads outside of all tensors."""
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        at = at.astype(np.uint64)
        tensor = np.searchsorted(self.begins, at, side="right")
        inside = (tensor > 0) & (at + size <= self.ends[np.maximum(tensor, 1) - 1])
        if not inside.all():
            raise IndexError(f"{self.name}: {(~inside).sum()} addresses outside of its tensors")


@contextmanager
def within_arguments() -> Iterator[set[str]]:
    """Raise where an interpreted kernel touches what is none of its tensors'.

    Gives the names of the kernels so far.  On a GPU nothing is checked: ``sanitize.py`` does that.
    """
    names: set[str] = set()
    if not knobs.runtime.interpret:
        yield names
        return
    running: list[_Kernel] = []
    launch = interpreter.GridExecutor.__call__
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    update = builder.create_atomic_rmw

    def checked_launch(self: Any, *args: Any, **options: Any) -> None:
        names.add(self.fn.__name__)
        running.append(_Kernel(self.fn.__name__, (*args, *options.values())))
        try:
            launch(self, *args, **options)
        finally:
            running.pop()

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        running[-1].check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        running[-1].check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_update(
        self: Any, what: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        running[-1].check(pointers, mask)
        return update(self, what, pointers, value, mask, *rest)

    checked = {
        "create_masked_load": checked_load,
        "create_masked_store": checked_store,
        "create_atomic_rmw": checked_update,
    }
    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", checked_launch),
        mock.patch.multiple(builder, **checked),
    ):
        yield names

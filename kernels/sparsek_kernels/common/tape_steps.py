"""Steps of a recorded call: allocations and torch operations, on tensors by slots.

A replay has a list of tensors: those that it is given come first, those that it makes behind them.
A slot is an index in that list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in a recorded argument."""

    place: int


class New(NamedTuple):
    """An allocation of a contiguous tensor by ``torch.empty`` or ``torch.zeros``, and its slot."""

    make: Callable[..., torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    place: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def on(self, tensors: list[Any], addresses: list[int]) -> None:
        """Put a new tensor among those by slots."""
        tensor = self.make(self.shape, dtype=self.dtype, device=self.device)
        tensors[self.place], addresses[self.place] = tensor, tensor.data_ptr()


ALLOCATIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty,
    torch.ops.aten.new_empty.default: torch.empty,
    torch.ops.aten.new_zeros.default: torch.zeros,
    torch.ops.aten.zeros.default: torch.zeros,
}
"""What repeats an operation that allocates a contiguous tensor."""


class Call(NamedTuple):
    """A torch operation, its arguments, and the slots of its results."""

    function: Any
    args: list[Any]
    options: dict[str, Any]
    results: list[int]
    is_view: bool
    reads: set[int]

    def on(self, tensors: list[Any], addresses: list[int]) -> None:
        """Run it on tensors by slots, and put what it makes among them."""
        args, options = self.args, self.options
        if self.reads:
            args = [_filled(x, tensors) for x in args]
            options = {name: _filled(x, tensors) for name, x in options.items()}
        found = self.function(*args, **options)
        results = found if isinstance(found, list | tuple) else (found,)
        for place, tensor in zip(self.results, results, strict=True):
            tensors[place], addresses[place] = tensor, tensor.data_ptr()


def _filled(value: Any, tensors: Sequence[Any]) -> Any:
    """An argument with tensors in the place of slots."""
    if isinstance(value, Slot):
        return tensors[value.place]
    if isinstance(value, list):
        return [_filled(x, tensors) for x in value]
    return value

"""Tensors in registers and pointers to memory, with the arithmetic of the language."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch


def unwrap(x: Any) -> Any:
    """The torch tensor behind a value; plain numbers as they are."""
    return x.data if isinstance(x, Value) else x


def divide(a: Any, b: Any) -> Any:
    """Integer division that rounds towards zero, as the hardware does."""
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")


def remainder(a: Any, b: Any) -> Any:
    return torch.fmod(torch.as_tensor(a), b)


def shift_left(a: Any, b: Any) -> Any:
    return torch.bitwise_left_shift(torch.as_tensor(a), b)


def shift_right(a: Any, b: Any) -> Any:
    return torch.bitwise_right_shift(torch.as_tensor(a), b)


def _binary(function: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.data, unwrap(other)
        if isinstance(b, torch.Tensor) and a.dtype != b.dtype:
            # Torch takes the type of the operand with dimensions; the language the wider one.
            kind = torch.promote_types(a.dtype, b.dtype)
            if not kind.is_floating_point:
                a, b = a.to(kind), b.to(kind)
        return like(function(b, a) if swapped else function(a, b), self, other)

    return apply


class Value:
    """An immutable tensor or number in registers."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, torch.Tensor) else torch.as_tensor(data)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        """Layouts of registers are not modelled."""
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if dtype is Word:
            return Word(self.data)
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key])

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)

    __add__, __radd__ = _binary(operator.add), _binary(operator.add, True)
    __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, True)
    __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, True)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, True)
    __floordiv__, __rfloordiv__ = _binary(divide), _binary(divide, True)
    __mod__, __rmod__ = _binary(remainder), _binary(remainder, True)
    __and__, __rand__ = _binary(operator.and_), _binary(operator.and_, True)
    __or__, __ror__ = _binary(operator.or_), _binary(operator.or_, True)
    __xor__, __rxor__ = _binary(operator.xor), _binary(operator.xor, True)
    __lshift__, __rlshift__ = _binary(shift_left), _binary(shift_left, True)
    __rshift__, __rrshift__ = _binary(shift_right), _binary(shift_right, True)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __hash__ = None  # type: ignore[assignment]


class Late(Value):
    """What a load brings once it is needed: neither its shape nor its type is asked for that."""

    def __init__(
        self, read: Callable[[], torch.Tensor], shape: list[int], dtype: torch.dtype
    ) -> None:
        self.read, self.known = read, (shape, dtype)

    @cached_property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.read()

    @property
    def shape(self) -> list[int]:
        return self.known[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.known[1]


class Word(Value):
    """Unsigned 32-bit integers, kept in 64 bits, since torch does not shift unsigned numbers."""

    def __init__(self, data: Any) -> None:
        super().__init__(torch.as_tensor(data).to(torch.int64) & 0xFFFFFFFF)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        return Value(self.data.to(torch.int32)) if dtype is torch.int32 else super().to(dtype)


def like(data: torch.Tensor, *operands: Any) -> Value:
    """A result, unsigned if an operand is; truth values are what they are."""
    for x in operands:
        if type(x) is Word and data.dtype != torch.bool:
            return Word(data)
    return Value(data)


class PointerType:
    """What ``pointer.dtype`` says."""

    def __init__(self, element_ty: torch.dtype) -> None:
        self.element_ty = element_ty


class Pointer:
    """Addresses of elements of one tensor's storage."""

    def __init__(self, storage: torch.Tensor, offset: torch.Tensor) -> None:
        self.storage, self.offset = storage, offset

    @staticmethod
    def of(tensor: torch.Tensor) -> Pointer:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(flat, torch.tensor(tensor.storage_offset()))

    @property
    def type(self) -> SimpleNamespace:
        """Layouts of registers are not modelled."""
        return SimpleNamespace(layout=None)

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.storage.dtype)

    def to(self, dtype: torch.dtype) -> Pointer:
        """An address as a number is still that address."""
        return self

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + unwrap(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset - unwrap(other))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.storage, self.offset[key])

    def resolve(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and mask of one shape; offsets that are masked out become 0."""
        held = torch.as_tensor(True if mask is None else unwrap(mask))
        offset, held = torch.broadcast_tensors(self.offset, held)
        offset, size = torch.where(held, offset, 0), self.storage.numel()
        low, high = offset.aminmax()
        if int(low) < 0 or (int(high) >= size and bool(held.any())):
            wrong = offset[held & ((offset < 0) | (offset >= size))]
            raise IndexError(f"access to element {int(wrong[0])} of {size} ({self.storage.dtype})")
        return offset, held

    def load(self, mask: Any = None, other: Any = None) -> Value:
        """Elements; those that are masked out are ``other``, garbage without."""
        if mask is None and not self.offset.dim() and 0 <= int(self.offset) < self.storage.numel():
            return Value(self.storage[int(self.offset)].clone())
        offset, held = self.resolve(mask)
        if not self.storage.numel():
            found = torch.zeros(offset.shape, dtype=self.storage.dtype)
        else:
            found = self.storage[offset].clone()  # an index without dimensions gives a view
        if mask is None:
            return Value(found)
        if other is None:
            other = float("nan") if found.is_floating_point() else 0x55555555
        return Value(torch.where(held, found, torch.as_tensor(unwrap(other)).to(found.dtype)))

    def store(self, value: Any, mask: Any = None) -> None:
        offset, held = self.resolve(mask)
        value = torch.as_tensor(unwrap(value)).to(self.storage.dtype)
        offset, held, value = torch.broadcast_tensors(offset, held, value)
        self.storage[offset[held]] = value[held]

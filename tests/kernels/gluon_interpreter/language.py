"""Stand-ins for what kernels import from the language."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels.gluon_interpreter.machine import (
    Barrier,
    Barriers,
    Machine,
    Memory,
    Product,
)
from tests.kernels.gluon_interpreter.values import Pointer, Value, Word, like, unwrap


def value(x: Any) -> Any:
    """Numbers as the language holds them at run time: 32-bit where they fit."""
    return _number(x) if type(x) in (int, float) else x


@functools.lru_cache(1 << 16, typed=True)
def _number(x: int | float) -> Value:
    if isinstance(x, float):
        return Value(torch.tensor(x, dtype=torch.float32))
    wide = not -(2**31) <= x < 2**31
    return Value(torch.tensor(x, dtype=torch.int64 if wide else torch.int32))


def _tile_layout(shape: Sequence[int], dtype: torch.dtype, **options: Any) -> Any:
    element = getattr(real, str(dtype).removeprefix("torch."))
    return real.NVMMASharedLayout.get_default_for([int(x) for x in shape], element, **options)


class Descriptor:
    """Tiles of a tensor that the copy engine moves; what lies outside reads as zero."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.host = host
        self.block_shape = list(host.block_shape)
        self.dtype = host.base.dtype
        self.layout = host.layout
        size = math.prod(self.block_shape) * self.dtype.itemsize
        self.block_type = SimpleNamespace(nbytes=size, shape=self.block_shape)
        self.pointer = Pointer.of(host.base)

    def place(self, coord: Sequence[Any]) -> tuple[Pointer, torch.Tensor]:
        rank = len(self.block_shape)
        offset = torch.zeros(self.block_shape, dtype=torch.int64)
        held = torch.ones(self.block_shape, dtype=torch.bool)
        for dim, (size, first) in enumerate(zip(self.block_shape, coord, strict=True)):
            at = int(first) + torch.arange(size)
            shape = [1] * rank
            shape[dim] = size
            offset = offset + (at * int(self.host.strides[dim])).view(shape)
            held = held & ((at >= 0) & (at < int(self.host.shape[dim]))).view(shape)
        return self.pointer + offset, held


def _axis(function: Any) -> Any:
    def apply(x: Any, axis: int | None = None, **_: Any) -> Value:
        return like(function(unwrap(x), axis), x)

    return apply


def _largest(x: torch.Tensor, axis: int | None) -> torch.Tensor:
    return x.amax() if axis is None else x.amax(axis)


def _smallest(x: torch.Tensor, axis: int | None) -> torch.Tensor:
    return x.amin() if axis is None else x.amin(axis)


def _total(x: torch.Tensor, axis: int | None) -> torch.Tensor:
    x = x.float() if x.is_floating_point() else x
    found = x.sum() if axis is None else x.sum(axis)
    return found.to(torch.int32) if x.dtype == torch.bool else found.to(x.dtype)


def _reduce(given: Value | tuple[Value, ...], axis: int, combine: Any) -> Any:
    """Halves are combined until one is left: sizes are powers of two."""
    parts = given if isinstance(given, tuple) else (given,)
    while parts[0].shape[axis] > 1:
        halves = [x.data.chunk(2, axis) for x in parts]
        found = combine(*(Value(low) for low, _ in halves), *(Value(high) for _, high in halves))
        parts = found if isinstance(found, tuple) else (found,)
    parts = tuple(Value(x.data.squeeze(axis)) for x in parts)
    return parts if isinstance(given, tuple) else parts[0]


def _running(x: Value, axis: int = 0, reverse: bool = False) -> Value:
    """Sums of ``x`` up to each place, or from it on."""
    data = x.data.flip(axis) if reverse else x.data
    data = data.cumsum(axis).to(x.dtype)
    return Value(data.flip(axis) if reverse else data)


def _histogram(x: Value, bins: int, mask: Value | None = None) -> Value:
    """How many there are of each of the numbers below ``bins``, ``[bins]`` int32."""
    some = x.data if mask is None else x.data[torch.as_tensor(mask.data).bool()]
    return Value(torch.bincount(some.long(), minlength=bins).to(torch.int32))


def _pair(function: Any) -> Any:
    def apply(a: Any, b: Any, **_: Any) -> Value:
        a, b = (torch.as_tensor(unwrap(value(x))) for x in (a, b))
        kind = torch.promote_types(a.dtype, b.dtype)
        return Value(function(a.to(kind), b.to(kind)))

    return apply


def _where(condition: Any, a: Any, b: Any) -> Value:
    def kind(x: Any) -> Any:
        return unwrap(x) if isinstance(x, Value) else x

    held, given = torch.as_tensor(unwrap(condition)).bool(), (a, b)
    a, b = kind(a), kind(b)
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        a = unwrap(value(a))
    return like(torch.where(held, a, b), *given)


class Language:
    """The names that kernels use, for one launch at a time."""

    def __init__(self) -> None:
        self.machine: Machine
        self.grid: tuple[int, int, int] = (1, 1, 1)
        gl = SimpleNamespace(
            **{
                name: getattr(torch, name)
                for name in ("int32", "int64", "float32", "float16", "bfloat16", "int1")
                if hasattr(torch, name)
            },
            uint32=Word,
            constexpr=lambda x: x,
            program_id=lambda axis: value(self.machine.current.program[axis]),
            num_programs=lambda axis=0: value(self.grid[axis]),
            arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
            zeros=lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype)),
            zeros_like=lambda x: Value(torch.zeros_like(x.data)),
            full=lambda shape, x, dtype, layout=None: Value(torch.full(shape, unwrap(x))).to(dtype),
            where=_where,
            maximum=_pair(torch.maximum),
            minimum=_pair(torch.minimum),
            max=_axis(_largest),
            min=_axis(_smallest),
            sum=_axis(_total),
            reduce=_reduce,
            gather=lambda x, index, axis: Value(x.data.gather(axis, index.data.long())),
            cumsum=_running,
            histogram=_histogram,
            ceil=lambda x: Value(torch.ceil(x.data)),
            exp2=lambda x: Value(torch.exp2(x.data)),
            log=lambda x: Value(torch.log(x.data)),
            log2=lambda x: Value(torch.log2(x.data)),
            sqrt=lambda x: Value(torch.sqrt(x.data)),
            abs=lambda x: Value(x.data.abs()),
            convert_layout=lambda x, layout, **_: x,
            permute=lambda x, order: Value(x.data.permute(*order)),
            trans=lambda x: Value(x.data.mT),
            split=lambda x: tuple(Value(part) for part in x.data.unbind(-1)),
            join=lambda a, b: Value(torch.stack((a.data, b.data), -1)),
            reshape=lambda x, shape: x.reshape(shape),
            expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
            broadcast_to=lambda x, shape: Value(x.data.expand(shape)),
            cdiv=lambda a, b: (a + b - 1) // b,
            load=lambda pointer, mask=None, other=None, **_: pointer.load(mask, other),
            store=lambda pointer, x, mask=None, **_: pointer.store(x, mask),
            atomic_add=self._atomic_add,
            atomic_max=self._atomic_max,
            dot=self._dot,
            static_range=range,
            range=self.range,
            debug_barrier=lambda: None,
            allocate_shared_memory=self._allocate,
            warp_specialize=lambda parts, warps, registers: self.machine.run(parts, warps),
            static_assert=lambda condition, message="": None,
            inline_asm_elementwise=self._assembly,
        )
        for name in dir(real):
            if name.endswith("Layout"):
                setattr(gl, name, getattr(real, name))
        gl.NVMMASharedLayout = SimpleNamespace(get_default_for=_tile_layout)
        self.names: dict[str, Any] = {
            "gl": gl,
            "tl": gl,
            "thread_barrier": lambda: None,
            "range": self.range,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: Barriers,
                init=lambda barrier, count: barrier.init(count),
                wait=self._wait,
                arrive=self._arrive,
                expect=self._expect,
                invalidate=lambda barrier: None,
            ),
            "tma": SimpleNamespace(store_wait=self._store_wait),
            "tma_load": self._fetch,
            "tma_store": self._put,
            "async_load": self._copy,
            "reinterpret": Memory.reinterpret,
            "async_copy": SimpleNamespace(
                mbarrier_arrive=self._copies_arrive,
                commit_group=self._commit,
                wait_group=self._wait_group,
            ),
            "tma_add": lambda desc, coord, source: self._put(desc, coord, source, adds=True),
            "fence_async_shared": self._fence,
            "warpgroup_mma": self._product,
            "warpgroup_mma_init": lambda x: Product(lambda: x, x),
            "warpgroup_mma_wait": self._product_wait,
        }

    @staticmethod
    def range(*bounds: Any, **_: Any) -> Iterator[Value]:
        for at in range(*(int(x) for x in bounds)):
            yield value(at)

    @staticmethod
    def _atomic_add(pointer: Pointer, x: Any, mask: Any = None, **_: Any) -> Value:
        before = pointer.load(mask)
        pointer.store(before + x, mask)
        return before

    @staticmethod
    def _atomic_max(pointer: Pointer, x: Any, mask: Any = None, **_: Any) -> Value:
        before = pointer.load(mask)
        pointer.store(Value(torch.maximum(before.data, unwrap(x))), mask)
        return before

    @staticmethod
    def _dot(a: Value, b: Value, acc: Value | None = None, **_: Any) -> Value:
        found = a.data.float() @ b.data.float()
        return Value(found if acc is None else acc.data + found)

    def _assembly(self, text: str, _constraints: str, args: list[Any], **_: Any) -> Any:
        if "@never" in text:
            return args[0]
        if "ld.acquire" in text:
            return self.machine.read_flag(args[0])
        if "st.release" in text:
            self._store_wait(0)
            args[0].store(args[1])
            return args[1]
        if "shfl.sync.idx" in text:  # of four lanes along the last axis, the one before
            return Value(args[0].data.roll(1, -1))
        if text.startswith("lg2.approx"):
            return Value(args[0].data.log2())
        if "griddepcontrol" in text:
            return value(0)
        raise NotImplementedError(f"assembly: {text}")

    def _allocate(self, dtype: Any, shape: Sequence[int], layout: Any, x: Any = None) -> Any:
        if layout is Barriers:
            return Barriers(shape[0])
        memory = Memory.allocate(dtype, [int(n) for n in shape], layout, self.machine)
        if x is not None:
            memory.store(x)
        return memory

    @staticmethod
    def _barrier(barrier: Barrier | Barriers) -> Barrier:
        return barrier.only if isinstance(barrier, Barriers) else barrier

    def _wait(self, barrier: Any, phase: Any, pred: Any = True, **_: Any) -> None:
        if pred:
            found, parity = self._barrier(barrier), int(phase)
            self.machine.wait(lambda: found.passed(parity))

    def _arrive(self, barrier: Any, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            self._barrier(barrier).arrive(count)
            self.machine.yield_turn()

    def _expect(self, barrier: Any, size: int, pred: Any = True) -> None:
        if pred:
            self._barrier(barrier).expect(size)

    def _fetch(
        self, desc: Descriptor, coord: Any, barrier: Any, result: Memory, pred: Any = True
    ) -> None:
        if not pred:
            return
        if math.prod(result.shape) != math.prod(desc.block_shape):
            raise ValueError(f"result: expected {desc.block_shape}, got {result.shape}")
        found, coord = self._barrier(barrier), [int(x) for x in coord]

        def work() -> None:
            pointer, held = desc.place(coord)
            result.write(pointer.load(held, 0.0).data.reshape(result.shape))
            found.land(desc.block_type.nbytes)

        self.machine.copy(work, found.in_flight)
        self.machine.yield_turn()

    def _put(self, desc: Descriptor, coord: Any, source: Memory, adds: bool = False) -> None:
        coord = [int(x) for x in coord]

        def work() -> None:
            pointer, held = desc.place(coord)
            tile = Value(source.read().reshape(desc.block_shape))
            pointer.store(tile + pointer.load(held, 0.0) if adds else tile, held)

        self.machine.put(work)

    def _fence(self) -> None:
        me = self.machine.current
        self.machine.settle(lambda load: load.partition is me)

    def _store_wait(self, pendings: int) -> None:
        self.machine.finish_stores(int(pendings))

    def _copy(self, memory: Memory, pointer: Pointer, mask: Any = None, **_: Any) -> None:
        def work() -> None:
            other = 0.0 if memory.dtype.is_floating_point else 0
            found = pointer.load(mask, other).data
            memory.replace(found.expand(memory.shape))

        self.machine.copy(work, self.machine.current.copies)

    def _copies_arrive(self, barrier: Any, increment_count: bool = True) -> None:
        me, found = self.machine.current, self._barrier(barrier)
        copies, me.copies = me.copies, []
        if increment_count:
            found.pending += 32 * me.warps

        def work() -> None:
            for copy in copies:
                copy()
            found.arrive(32 * me.warps)

        self.machine.copy(work, found.in_flight)
        self.machine.yield_turn()

    def _commit(self) -> None:
        me = self.machine.current
        me.groups.append(me.copies)
        me.copies = []

    def _wait_group(self, later: int) -> None:
        groups = self.machine.current.groups
        while len(groups) > int(later):
            for work in groups.pop(0):
                work()

    def _product(
        self, a: Any, b: Memory, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any
    ) -> Any:
        used, left = bool(use_acc), None if isinstance(a, Memory) else a.data

        def work() -> Value:
            rows = a.read() if left is None else left
            found = rows.float() @ b.read().float()
            if used:
                base = acc.result if isinstance(acc, Product) else acc
                if base is None:
                    raise RuntimeError("the accumulator is still being computed")
                found = found + base.data
            return Value(found)

        product = self.machine.issue(work)
        if is_async:
            return product
        self.machine.finish_products(0)
        return product.result

    def _product_wait(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        self.machine.finish_products(int(num_outstanding))
        pending = self.machine.current.products
        found = []
        for dep in deps:
            if isinstance(dep, Product):
                if any(dep is x for x in pending):
                    raise RuntimeError("the wait leaves a product that it names unfinished")
                dep = dep.result
            found.append(dep)
        return found[0] if len(found) == 1 else tuple(found)

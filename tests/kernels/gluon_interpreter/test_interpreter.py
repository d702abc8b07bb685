"""What the interpreter must make go wrong does, and what is right passes."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout, SwizzledSharedLayout, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels.gluon_interpreter.language import Descriptor, Language, value
from tests.kernels.gluon_interpreter.machine import Deadlock, Machine, Memory, Partition, places
from tests.kernels.gluon_interpreter.values import Pointer, Value, Word

FLAT = SwizzledSharedLayout(1, 1, 1, [0])
PLAIN = SwizzledSharedLayout(1, 1, 1, [1, 0])
TIMINGS = pytest.mark.parametrize("late", [True, False])
ORDERS = pytest.mark.parametrize("order", ["first first", "last first"])


def run(
    program: Callable[..., Any], *args: Any, order: str = "first first", late: bool = True
) -> Any:
    """What ``program(x, *args)`` returns, where ``x`` holds the names of the language."""
    language, found = Language(), []
    language.machine = Machine(order, late)
    names = types.SimpleNamespace(**language.names)
    main = Partition(lambda: found.append(program(names, *args)), 4, (0, 0, 0))
    language.machine.launch(iter([main]), 1)
    return found[0]


def pipeline(x: Any, source: torch.Tensor, waits: bool, gives_back: bool) -> torch.Tensor:
    """Copy rows through a ring of two buffers, one partition to the other."""
    rows, cols = source.shape
    ring = x.gl.allocate_shared_memory(torch.float32, [2, cols], FLAT)
    full = x.gl.allocate_shared_memory(torch.int64, [2, 1], x.mbarrier.MBarrierLayout())
    empty = x.gl.allocate_shared_memory(torch.int64, [2, 1], x.mbarrier.MBarrierLayout())
    for i in range(2):
        x.mbarrier.init(full.index(i), count=32)
        x.mbarrier.init(empty.index(i), count=1)
    found = torch.full_like(source, float("nan"))

    def copies() -> None:
        for step in range(rows):
            x.mbarrier.wait(empty.index(step % 2), ((step // 2) & 1) ^ 1)
            pointer = Pointer.of(source) + Value(torch.arange(cols) + step * cols)
            x.async_load(ring.index(step % 2), pointer)
            x.async_copy.mbarrier_arrive(full.index(step % 2), increment_count=False)

    def computes() -> None:
        for step in range(rows):
            if waits:
                x.mbarrier.wait(full.index(step % 2), (step // 2) & 1)
            found[step] = ring.index(step % 2).load(None).data
            if gives_back:
                x.mbarrier.arrive(empty.index(step % 2), count=1)

    x.gl.warp_specialize([(computes, ()), (copies, ())], [1], [24])
    return found


@ORDERS
@TIMINGS
def test_a_ring_delivers(order: str, late: bool) -> None:
    source = torch.randn(7, 4)
    assert torch.equal(run(pipeline, source, True, True, order=order, late=late), source)


@ORDERS
def test_a_buffer_that_is_not_waited_for_is_not_filled(order: str) -> None:
    """Copies land when they are waited for, where nothing else is late."""
    found = run(pipeline, torch.randn(2, 4), False, False, order=order, late=False)
    assert bool(found.isnan().all())


@ORDERS
@TIMINGS
def test_a_buffer_that_is_never_given_back_stops_the_program(order: str, late: bool) -> None:
    with pytest.raises(Deadlock, match="wait for one another"):
        run(pipeline, torch.randn(7, 4), True, False, order=order, late=late)


def test_too_many_arrivals() -> None:
    def program(x: Any) -> None:
        bar = x.gl.allocate_shared_memory(torch.int64, [1], x.mbarrier.MBarrierLayout())
        x.mbarrier.init(bar, count=2)
        x.mbarrier.arrive(bar, count=3)

    with pytest.raises(RuntimeError, match="more arrivals"):
        run(program)


@TIMINGS
def test_an_operand_that_is_overwritten_before_the_wait(late: bool) -> None:
    """Products happen at the wait, or at once: a kernel must be right either way."""

    def program(x: Any) -> Value:
        a = x.gl.allocate_shared_memory(torch.bfloat16, [16, 16], PLAIN)
        b = x.gl.allocate_shared_memory(torch.bfloat16, [16, 16], PLAIN)
        a.store(Value(torch.eye(16, dtype=torch.bfloat16)))
        b.store(Value(torch.ones(16, 16, dtype=torch.bfloat16)))
        zero = Value(torch.zeros(16, 16))
        token = x.warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
        b.store(Value(torch.zeros(16, 16, dtype=torch.bfloat16)))
        return x.warpgroup_mma_wait(0, deps=[token])

    want = torch.zeros(16, 16) if late else torch.ones(16, 16)
    assert torch.equal(run(program, late=late).data, want)


def test_a_wait_that_leaves_its_product_unfinished() -> None:
    def program(x: Any) -> None:
        tile = x.gl.allocate_shared_memory(torch.bfloat16, [16, 16], PLAIN)
        tile.store(Value(torch.ones(16, 16, dtype=torch.bfloat16)))
        zero = Value(torch.zeros(16, 16))
        tokens = [x.warpgroup_mma(tile, tile, zero, is_async=True) for _ in range(2)]
        assert float(x.warpgroup_mma_wait(1, deps=tokens[:1]).data[0, 0]) == 16.0
        x.warpgroup_mma_wait(1, deps=tokens[1:])

    with pytest.raises(RuntimeError, match="unfinished"):
        run(program)


def test_addresses_outside_of_a_tensor() -> None:
    pointer = Pointer.of(torch.arange(10.0)) + Value(torch.arange(8, 12))
    with pytest.raises(IndexError, match="element 10 of 10"):
        pointer.load()
    kept = pointer.load(Value(torch.tensor([True, True, False, False])), 5.0)
    assert kept.data.tolist() == [8.0, 9.0, 5.0, 5.0]
    with pytest.raises(IndexError, match="element 10 of 10"):
        pointer.store(Value(torch.zeros(4)))


@pytest.mark.parametrize("kept_by", ["nothing", "a fence", "a product", "a store of threads"])
def test_registers_come_when_they_are_needed(kept_by: str) -> None:
    """A bulk copy into a buffer may overtake a load from it; what threads store may not."""
    layout = NVMMASharedLayout.get_default_for([16, 16], bfloat16)
    ones, zeros = (f(16, 16, dtype=torch.bfloat16) for f in (torch.ones, torch.zeros))

    def program(x: Any) -> Any:
        bar = x.gl.allocate_shared_memory(torch.int64, [1], x.mbarrier.MBarrierLayout())
        x.mbarrier.init(bar, count=1)
        tile = x.gl.allocate_shared_memory(torch.bfloat16, [16, 16], layout)
        tile.store(Value(ones))
        loaded = tile.load()
        x.thread_barrier()
        if kept_by == "a fence":
            x.fence_async_shared()
        elif kept_by == "a product":
            x.warpgroup_mma(loaded, tile, Value(torch.zeros(16, 16)))
        if kept_by == "a store of threads":
            tile.store(Value(zeros))
        else:
            described = TensorDescriptor(zeros, [16, 16], [16, 1], [16, 16], layout)
            x.mbarrier.expect(bar, 512)
            x.tma_load(Descriptor(described), [0, 0], bar, tile)
            x.mbarrier.wait(bar, 0)
        return loaded.data

    assert torch.equal(run(program), zeros if kept_by == "nothing" else ones)
    assert torch.equal(run(program, late=False), ones)


def test_memory_starts_as_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        memory = Memory.allocate(dtype, [4], FLAT, Machine("first first", True))
        assert bool(memory.read().isnan().all())


def test_columns_of_a_swizzled_tile_lie_apart() -> None:
    """A tile of 128 columns holds all rows of the first 64 before those of the next."""
    tile = NVMMASharedLayout.get_default_for([64, 128], bfloat16)
    at = places([64, 128], tile, 2)
    assert at[1, 0] == 64
    assert at[0, 64] == 64 * 64
    machine = Machine("first first", True)
    memory = Memory.allocate(torch.bfloat16, [64, 128], tile, machine)
    memory.store(Value(torch.arange(64)[:, None].expand(64, 128).to(torch.bfloat16)))
    halves = memory.reinterpret(torch.bfloat16, [2, 64, 64], tile)
    assert halves.index(1).read()[:, 0].tolist() == list(range(64))


def test_numbers_are_those_of_the_hardware() -> None:
    assert int(value(-7) // 2) == -3
    assert int(value(-7) % 2) == -1
    assert value(2**31).dtype == torch.int64
    wide = value(1).to(torch.int64) * Value(torch.arange(2, dtype=torch.int32))
    assert wide.dtype == torch.int64
    wrapped = value(0x01010101).to(Word) * 0xFF
    assert int(wrapped) == 0xFFFFFFFF
    assert int((wrapped + 1) >> 24) == 0

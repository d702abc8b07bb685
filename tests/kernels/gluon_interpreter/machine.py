"""The hardware of programs: shared memory, barriers, copies in flight, and partitions in turn."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from tests.kernels.gluon_interpreter.values import Late, Pointer, Value, unwrap

Work = Callable[[], None]
_THREADS = ThreadPoolExecutor(1024)
"""Those that wait for work do it; there are as many as have run at a time."""


class Deadlock(RuntimeError):
    """Every partition that is left waits for another."""


def places(shape: Sequence[int], layout: Any, itemsize: int) -> torch.Tensor:
    """Where each element of an array of this layout lies, in elements from its start.

    The last dimension of a swizzled tile is cut into columns of one swizzle span; the swizzle
    itself stays within eight rows and looks the same from every layout that shares the tile.
    """
    total = math.prod(shape)
    if isinstance(layout, NVMMASharedLayout) and len(shape) > 1:
        span, cols = layout.swizzle_byte_width // itemsize, shape[-1]
        if span and cols > span:
            rows = math.prod(shape[-layout.rank : -1])
            flat = torch.arange(total).view(-1, cols // span, rows, span)
            return flat.transpose(1, 2).reshape(shape)
    return torch.arange(total).view(*shape)


class Memory:
    """A view of shared memory; tests see NaN where nothing was written."""

    def __init__(
        self,
        data: torch.Tensor,
        place: torch.Tensor,
        layout: Any,
        dtype: torch.dtype,
        machine: Machine,
    ) -> None:
        self.data, self.place, self.layout, self.dtype = data, place, layout, dtype
        self.machine = machine

    @staticmethod
    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any, machine: Machine) -> Memory:
        place = places(shape, layout, dtype.itemsize)
        data = torch.empty(place.numel() * dtype.itemsize, dtype=torch.uint8)
        data.fill_(0xFF)  # NaN in every float type, -1 in every integer type
        return Memory(data, place, layout, dtype, machine)

    @property
    def shape(self) -> list[int]:
        return list(self.place.shape)

    def _view(self, place: torch.Tensor) -> Memory:
        return Memory(self.data, place, self.layout, self.dtype, self.machine)

    def index(self, at: Any) -> Memory:
        at = int(at)
        if not 0 <= at < self.place.shape[0]:
            raise IndexError(f"buffer {at} of {self.place.shape[0]}")
        return self._view(self.place[at])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self._view(self.place.narrow(dim, int(start), int(length)))

    def permute(self, order: Sequence[int]) -> Memory:
        return self._view(self.place.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Memory:
        return self._view(self.place.reshape(shape))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory:
        first = int(self.place.min()) * self.dtype.itemsize
        place = places(shape, layout, dtype.itemsize) + first // dtype.itemsize
        if place.numel() * dtype.itemsize > self.place.numel() * self.dtype.itemsize:
            raise ValueError(f"shape: expected at most {self.shape}, got {shape}")
        return Memory(self.data, place, layout, dtype, self.machine)

    def read(self) -> torch.Tensor:
        return self.data.view(self.dtype)[self.place]

    def write(self, value: torch.Tensor) -> None:
        self.data.view(self.dtype)[self.place] = value.to(self.dtype).expand(self.place.shape)

    def load(self, layout: Any = None) -> Value:
        return self.machine.load(self)

    def store(self, value: Any) -> None:
        if list(value.shape) != self.shape:
            raise ValueError(f"value: expected shape {self.shape}, got {list(value.shape)}")
        self.replace(unwrap(value))

    def replace(self, value: torch.Tensor) -> None:
        """Write as threads do, in the order of their barriers: what was loaded before has come."""
        self.machine.settle(lambda load: load.memory.data is self.data)
        self.write(value)

    def _keep_alive(self) -> None:
        return None


class Barrier:
    """An mbarrier: arrivals and bytes that its phase still expects."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0
        self.in_flight: list[Work] = []

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        if self.pending < 0:
            raise RuntimeError("more arrivals than the barrier's count")
        self._turn()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def land(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over; copies in flight land here."""
        if self.phases % 2 != parity:
            return True
        waiting, self.in_flight = self.in_flight, []
        for work in waiting:
            work()
        return self.phases % 2 != parity


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]

    def init(self, count: int) -> None:
        self.only.init(count)

    @property
    def only(self) -> Barrier:
        (barrier,) = self.all
        return barrier


@dataclass(frozen=True)
class Load:
    """Registers on their way from shared memory."""

    memory: Memory
    partition: Partition
    value: Late


@dataclass
class Product:
    """A matrix product that tensor cores have been told to make."""

    work: Callable[[], Value]
    result: Value | None = None

    def finish(self) -> None:
        if self.result is None:
            self.result = self.work()


@dataclass(eq=False)
class Partition:
    """One partition's warps: its thread, and what it has in flight."""

    function: Callable[[], Any]
    warps: int
    program: tuple[int, int, int]
    ready: Callable[[], bool] | None = None
    alive: bool = True
    turn: threading.Lock = field(default_factory=threading.Lock)
    products: list[Product] = field(default_factory=list)
    copies: list[Work] = field(default_factory=list)
    groups: list[list[Work]] = field(default_factory=list)
    stores: list[Work] = field(default_factory=list)
    flag: tuple[int, int, int] | None = None
    patient: bool = False

    def drain(self) -> None:
        """What is in flight at the end of a partition lands."""
        for work in itertools.chain(*self.groups, self.copies, self.stores):
            work()


class Machine:
    """Partitions of programs side by side: the first in the order that need not wait runs."""

    def __init__(self, order: str, late: bool) -> None:
        self.order, self.late = order, late
        self.current: Partition
        self.partitions: list[Partition] = []
        self.threads: list[Future[None]] = []
        self.problem: BaseException | None = None
        self.done = threading.Event()
        self.loads: list[Load] = []

    def load(self, memory: Memory) -> Value:
        """What memory holds now, or when it is needed: barriers do not wait for registers."""
        if not self.late:
            return Value(memory.read())
        value = Late(memory.read, memory.shape, memory.dtype)
        self.loads.append(Load(memory, self.current, value))
        return value

    def settle(self, chosen: Callable[[Load], bool]) -> None:
        """Let some loads come."""
        for load in filter(chosen, self.loads):
            _ = load.value.data
        self.loads = [load for load in self.loads if "data" not in vars(load.value)]

    def launch(self, programs: Iterator[Partition], side_by_side: int) -> None:
        """Run programs to their end; the next one starts when one of them has ended."""
        self.programs = programs
        for program in itertools.islice(programs, side_by_side):
            self._start(program)
        self._next()
        self.done.wait()
        for partition in self.partitions:
            partition.turn.release()
        wait(self.threads)
        if self.problem is not None:
            raise self.problem

    def run(
        self, parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: list[int]
    ) -> None:
        """Run partitions of the current program to their end."""
        me = self.current
        forked = [
            Partition(partial(function, *args), n, me.program)
            for (function, args), n in zip(parts, [me.warps, *warps], strict=True)
        ]
        for partition in forked:
            self._start(partition)
        self.wait(lambda: not any(x.alive for x in forked))

    def _start(self, partition: Partition) -> None:
        self.partitions.append(partition)
        partition.turn.acquire()
        self.threads.append(_THREADS.submit(self._main, partition))

    def _main(self, partition: Partition) -> None:
        partition.turn.acquire()
        if self.problem is not None:
            return
        try:
            with torch.inference_mode():
                partition.function()
                partition.drain()
        except BaseException as problem:
            self.problem = self.problem or problem
        partition.alive = False
        if self.problem is None:
            self.partitions.remove(partition)
            if all(x.program != partition.program for x in self.partitions):
                for program in itertools.islice(self.programs, 1):
                    self._start(program)
        self._next()

    def _next(self) -> None:
        if not self.partitions or self.problem is not None:
            self.done.set()
            return
        queue = self.partitions if self.order == "first first" else self.partitions[::-1]
        queue = sorted(queue, key=lambda x: x.patient)
        try:
            chosen = next((x for x in queue if x.ready is None or x.ready()), None)
        except BaseException as problem:
            self.problem, chosen = problem, None
        if chosen is None:
            self.problem = self.problem or Deadlock(f"{len(queue)} partitions wait for one another")
            self.done.set()
            return
        chosen.ready = None
        self.current = chosen
        chosen.turn.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let others run until ``ready()``."""
        me = self.current
        me.ready = ready
        self._next()
        me.turn.acquire()
        if self.problem is not None:
            raise SystemExit

    def yield_turn(self) -> None:
        """Let others run that come first in the order."""
        self.wait(lambda: True)

    def pause(self) -> None:
        """Let others run as far as they can."""
        me = self.current
        me.patient = True
        self.wait(lambda: True)
        me.patient = False

    def read_flag(self, flag: Pointer) -> Value:
        """What a partition reads again and again changes at some time: others run until then."""
        me, found, place = self.current, flag.load(), (flag.storage.data_ptr(), int(flag.offset))
        if me.flag == (*place, int(found)):
            before = int(found)
            self.wait(lambda: int(flag.load()) != before)
            found = flag.load()
        me.flag = (*place, int(found))
        return found

    def copy(self, work: Work, queue: list[Work]) -> None:
        """A copy into shared memory: now, or when ``queue`` is waited for."""
        if self.late:
            work()
        else:
            queue.append(work)

    def put(self, work: Work) -> None:
        """A copy from shared memory: when it is waited for, or now."""
        if self.late:
            self.current.stores.append(work)
        else:
            work()

    def finish_stores(self, later: int) -> None:
        stores = self.current.stores
        count = max(len(stores) - later, 0)
        if count:
            self.pause()
        for work in stores[:count]:
            work()
        del stores[:count]

    def issue(self, work: Callable[[], Value]) -> Product:
        product = Product(work)
        self.current.products.append(product)
        if not self.late:
            product.finish()
        return product

    def finish_products(self, later: int) -> None:
        products = self.current.products
        count = max(len(products) - later, 0)
        if count and self.late:
            self.pause()
        for product in products[:count]:
            product.finish()
        del products[:count]

"""One program's hardware: shared memory, barriers, copies in flight, and partitions in turn."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from tests.kernels.gluon_interpreter.values import Value, unwrap

Work = Callable[[], None]


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
        self, data: torch.Tensor, place: torch.Tensor, layout: Any, dtype: torch.dtype
    ) -> None:
        self.data, self.place, self.layout, self.dtype = data, place, layout, dtype

    @staticmethod
    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory:
        place = places(shape, layout, dtype.itemsize)
        data = torch.empty(place.numel() * dtype.itemsize, dtype=torch.uint8)
        data.fill_(0xFF)  # NaN in every float type, -1 in every integer type
        return Memory(data, place, layout, dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.place.shape)

    def _view(self, place: torch.Tensor) -> Memory:
        return Memory(self.data, place, self.layout, self.dtype)

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

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory:
        first = int(self.place.min()) * self.dtype.itemsize
        place = places(shape, layout, dtype.itemsize) + first // dtype.itemsize
        if place.numel() * dtype.itemsize > self.place.numel() * self.dtype.itemsize:
            raise ValueError(f"shape: expected at most {self.shape}, got {shape}")
        return Memory(self.data, place, layout, dtype)

    def read(self) -> torch.Tensor:
        return self.data.view(self.dtype)[self.place]

    def write(self, value: torch.Tensor) -> None:
        self.data.view(self.dtype)[self.place] = value.to(self.dtype).expand(self.place.shape)

    def load(self, layout: Any = None) -> Value:
        return Value(self.read())

    def store(self, value: Any) -> None:
        if list(value.shape) != self.shape:
            raise ValueError(f"value: expected shape {self.shape}, got {list(value.shape)}")
        self.write(unwrap(value))

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
        """Whether the phase of this parity is over; copies in flight land no earlier than here."""
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

    function: Callable[..., Any]
    args: tuple[Any, ...]
    warps: int
    ready: Callable[[], bool] | None = None
    alive: bool = True
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list[Product] = field(default_factory=list)
    copies: list[Work] = field(default_factory=list)
    groups: list[list[Work]] = field(default_factory=list)
    stores: list[Work] = field(default_factory=list)


class Machine:
    """Partitions of one program, one of them running at a time until it must wait."""

    def __init__(self, order: str, late: bool, warps: int) -> None:
        self.order, self.late = order, late
        self.current = Partition(lambda: None, (), warps)
        self.partitions: list[Partition] = []
        self.problem: BaseException | None = None

    def run(self, parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: list[int]):
        """Run partitions to their end."""
        outer = self.current
        self.partitions = [
            Partition(function, args, n)
            for (function, args), n in zip(parts, [outer.warps, *warps], strict=True)
        ]
        if self.order == "last first":
            self.partitions.reverse()
        self.done = threading.Event()
        threads = [threading.Thread(target=self._main, args=(x,)) for x in self.partitions]
        for thread in threads:
            thread.start()
        self._next()
        self.done.wait()
        for partition in self.partitions:
            partition.turn.release()
        for thread in threads:
            thread.join()
        self.current = outer
        if self.problem is not None:
            raise self.problem

    def _main(self, partition: Partition) -> None:
        partition.turn.acquire()
        if self.problem is not None:
            return
        try:
            partition.function(*partition.args)
            self.drain(partition)
        except BaseException as problem:
            self.problem = self.problem or problem
        partition.alive = False
        self._next()

    def drain(self, partition: Partition) -> None:
        """What is in flight at the end of a partition lands."""
        groups = [*partition.groups, partition.copies, partition.stores]
        for work in itertools.chain.from_iterable(groups):
            work()

    def _next(self) -> None:
        alive = [x for x in self.partitions if x.alive]
        if not alive or self.problem is not None:
            self.done.set()
            return
        try:
            chosen = next((x for x in alive if x.ready is None or x.ready()), None)
        except BaseException as problem:
            self.problem, chosen = problem, None
        if chosen is None:
            self.problem = self.problem or Deadlock(f"{len(alive)} partitions wait for one another")
            self.done.set()
            return
        chosen.ready = None
        self.current = chosen
        chosen.turn.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let others run until ``ready()``."""
        if not self.partitions:
            if not ready():
                raise Deadlock("the only partition waits for nobody")
            return
        me = self.current
        me.ready = ready
        self._next()
        me.turn.acquire()
        if self.problem is not None:
            raise SystemExit

    def issue(self, work: Callable[[], Value]) -> Product:
        product = Product(work)
        self.current.products.append(product)
        if not self.late:
            product.finish()
        return product

    def finish_products(self, later: int) -> None:
        products = self.current.products
        count = max(len(products) - later, 0)
        for product in products[:count]:
            product.finish()
        del products[:count]

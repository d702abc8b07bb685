"""Launches that are recorded once and replayed on other tensors, without the JIT's analysis.

The layers of a model launch the same kernels in every step; only the addresses of their tensors
differ.  A launch through the JIT looks at each of some forty arguments, which takes longer than
many of these kernels run.  So the first layer's launches are recorded with all of their arguments,
and the other layers replay them::

    with recording((q, k, v)) as record:
        launch_everything(q, k, v)         # through run()
    replay = record.finish()
    replay((q2, k2, v2))                   # the same shapes, strides, dtypes and alignment
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from sparsek_kernels.common.device import current_stream

Tensors = tuple[torch.Tensor | None, ...]

_state = threading.local()


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel``; a recording of this thread that is going on keeps the launch."""
    if compiles():
        kernel.warmup(*args, grid=grid, **options)
        return
    compiled = kernel[grid](*args, **options)
    record: Recording | None = getattr(_state, "record", None)
    if record is not None:
        record.add(kernel, compiled, grid, args, options)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Compile what :func:`run` would launch in this thread meanwhile, by some threads at a time."""
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor):
        _state.compiles = True
        try:
            yield
        finally:
            _state.compiles = False


def compiles() -> bool:
    """Whether :func:`run` launches nothing in this thread, within :func:`compiling`."""
    return getattr(_state, "compiles", False)


@contextmanager
def recording(tensors: Tensors) -> Iterator[Recording]:
    """Record what :func:`run` launches in this thread meanwhile.

    Args:
        tensors: what a replay exchanges.  Every other argument stays as it is recorded.
    """
    record = Recording(tensors)
    before, _state.record = getattr(_state, "record", None), record
    try:
        yield record
    finally:
        _state.record = before


def has_launch_hook() -> bool:
    """Whether somebody watches launches, as profilers of Triton do; a replay would hide them."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


_STREAM = 3
"""Index of the stream in what a launcher takes, after the grid."""
_MOST_FORMS, _MOST_MAPS = 256, 4096
"""Descriptors of a kernel's argument that differ in more than an address, and addresses of one."""


class _Maps(dict[int, Any]):
    """What a launch takes for a descriptor, by the address of its matrix; all else is the same.

    Args:
        make: what it takes for an address.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MOST_MAPS:
            self.clear()
        found = self[address] = self._make(address)
        return found


_Place = tuple[int, int, int]
"""An argument that a replay exchanges: its index, that of a tensor, and bytes behind its start."""


class Launch(NamedTuple):
    """A function that launches a kernel, its arguments, and which of them a replay exchanges."""

    run: Any
    args: list[Any]
    pointers: Sequence[_Place]
    described: Sequence[tuple[int, int, int, _Maps]]

    def on(self, addresses: Sequence[int], stream: int) -> None:
        """Launch it on tensors at these addresses; that of ``None`` is 0."""
        args = self.args.copy()
        args[_STREAM] = stream
        for index, tensor, offset in self.pointers:
            args[index] = addresses[tensor] + offset
        for index, tensor, offset, maps in self.described:
            args[index] = maps[addresses[tensor] + offset]
        self.run(*args)


@dataclass(frozen=True, slots=True)
class _Address:
    """The base of a descriptor, of which launches ask nothing but the address."""

    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class _Kernel:
    """How a compiled kernel is launched with the least of Triton's Python.

    All launches of one agree in which arguments are descriptors, and in how they are passed on.

    Args:
        launcher: Triton's.
        head: what it takes before the kernel's own arguments.
        own: arguments of a launch.
    """

    def __init__(self, launcher: Any, head: list[Any], own: list[Any]) -> None:
        run, args, behind = _shortest(launcher, head, own)
        self.head = args[_STREAM + 1 : len(args) - len(own)]
        self.descriptors = [i for i, x in enumerate(args) if _is_descriptor(x)]
        self.run, self.expand, self.places = _unwrapped(run, args, behind)
        self._forms: dict[Hashable, _Maps] = {}

    def expanded(self, args: list[Any], described: Sequence[_Maps]) -> list[Any]:
        """The function's arguments, with what it takes for descriptors at their addresses."""
        for index, maps in reversed(list(zip(self.descriptors, described, strict=True))):
            value = args[index]
            sizes = [*value.shape, *value.strides] if self.expand else []
            args[index : index + 1] = [maps[value.base.data_ptr()], *sizes]
        return args

    def maps(self, args: list[Any]) -> list[_Maps]:
        """What launches take for each descriptor of some arguments."""
        found = []
        for index in self.descriptors:
            parts = vars(args[index]).items()  # the layout is the kernel's
            same = [(name, x) for name, x in parts if name not in ("base", "layout")]
            form = (index, *(tuple(x) if isinstance(x, list) else x for _, x in same))
            if form not in self._forms:
                if len(self._forms) >= _MOST_FORMS:
                    self._forms.clear()
                given = {i: _moved(args[i], 0) for i in self.descriptors}  # keeps no tensors
                self._forms[form] = _Maps(partial(self._map, given, index, len(args)))
            found.append(self._forms[form])
        return found

    def _map(self, given: dict[int, Any], index: int, count: int, address: int) -> Any:
        """What a launch takes for one of the given descriptors at an address."""
        moved = {i: _moved(one, address) for i, one in given.items()}
        if self.expand is None:
            return moved[index]
        return self.expand(*(moved.get(i) for i in range(count)))[self.places[index]]


_kernels: dict[Hashable, _Kernel] = {}
"""By Triton's launcher and the function that it launches."""


class Recording:
    """Launches so far, and whether they can be replayed."""

    def __init__(self, tensors: Tensors) -> None:
        self._storages: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By address, the exchanged tensors that it may be in, and bytes behind their start."""
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                self.follow(tensor, index)
        self.launches: list[Launch] = []
        self.kept: list[torch.Tensor] = []
        """Tensors of launches that a replay does not exchange."""
        self._listens = True
        self.usable = True
        """Whether the launches can be replayed."""
        self.ambiguous = False
        """Whether an argument may be several of the tensors: views of one storage."""

    def follow(self, tensor: torch.Tensor, index: int) -> None:
        """Take a tensor as the ``index``-th that a replay exchanges; it stays alive meanwhile."""
        start = tensor.data_ptr()
        self._storages[storage_of(tensor)].append((index, start))
        self._places[start].append((index, 0))

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Keep no launch meanwhile."""
        self._listens = False
        try:
            yield
        finally:
            self._listens = True

    def add(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Keep one launch; ``compiled`` is ``None`` in the interpreter, which replays nothing."""
        if not self._listens:
            return
        if compiled is None:
            self.usable = False
        if not self.usable:
            return
        own = [*args, *(options[name] for name in kernel.arg_names[len(args) :])]
        sizes = [*(*grid, 1, 1)[:_STREAM], None]
        key = compiled.run, compiled.function
        found = _kernels.get(key)
        if found is None:
            head = (compiled.function, compiled.packed_metadata, None, None, None)
            found = _kernels[key] = _Kernel(compiled.run, [*sizes, *head], own)
        bound = [*sizes, *found.head, *own]
        pointers: list[_Place] = []
        described: list[tuple[int, int, int, _Maps]] = []
        for index, tensor in enumerate(bound):
            if not isinstance(tensor, torch.Tensor):
                continue
            bound[index] = address = tensor.data_ptr()
            place = self._find(tensor, address)
            if place is not None:
                pointers.append((found.places[index], *place))
        maps = found.maps(bound)
        for index, own_maps in zip(found.descriptors, maps, strict=True):
            base = bound[index].base
            place = self._find(base, base.data_ptr())
            if place is not None:
                described.append((found.places[index], *place, own_maps))
        self.launches.append(Launch(found.run, found.expanded(bound, maps), pointers, described))

    def _find(self, tensor: torch.Tensor, address: int) -> tuple[int, int] | None:
        """The exchanged tensor that an argument is, or lies in, and bytes behind its start.

        ``None`` for any other, which is kept.
        """
        if address not in self._places:
            inside = self._storages.get(storage_of(tensor), ())
            self._places[address] = [(index, address - start) for index, start in inside]
        same = self._places[address]
        if not same:
            self.kept.append(tensor)
            return None
        if len(same) > 1:  # which of them the argument follows cannot be told
            self.usable, self.ambiguous = False, True
        return same[0]

    @property
    def empty(self) -> bool:
        """Whether nothing was launched."""
        return self.usable and not self.launches

    def finish(self) -> Replay | None:
        """The launches; ``None`` where they cannot be replayed, or there were none."""
        if not self.usable or not self.launches:
            return None
        return Replay(self.launches, self.kept)


@dataclass(frozen=True)
class Replay:
    """Recorded launches, with what they need besides the exchanged tensors.

    Args:
        launches: in order.
        kept: tensors whose addresses the launches have; they live as long as the replay.
    """

    launches: Sequence[Launch]
    kept: Sequence[torch.Tensor] = field(repr=False)

    def __call__(self, tensors: Tensors, device: int) -> None:
        """Launch everything on the device's current stream, on these tensors."""
        self.launch([0 if x is None else x.data_ptr() for x in tensors], current_stream(device))

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch everything on tensors at these addresses; that of ``None`` is 0."""
        for one in self.launches:
            one.on(addresses, stream)


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape")


def _moved(descriptor: Any, address: int) -> Any:
    """A descriptor of the same matrix at another address."""
    moved = copy.copy(descriptor)
    moved.base = _Address(address)
    return moved


def _shortest(launcher: Any, head: list[Any], own: list[Any]) -> tuple[Any, list[Any], int | None]:
    """What launches in the end, and its arguments, which end with the kernel's ``own``.

    Triton's launcher is in Python and spends half a microsecond before it calls a function in C.  A
    copy of it shows that call.  Where the launcher does more, or ends otherwise, it stays.

    Returns:
        The function, its arguments, and behind how many of them it takes the others as one tuple,
        as from Triton 3.8 on; ``None`` where it takes all of them alike.
    """
    whole = [*head, *own]
    if any(getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile")):
        return launcher, whole, None
    calls: list[tuple[Any, ...]] = []
    shown = copy.copy(launcher)
    shown.launch = lambda *args: calls.append(args)
    try:
        shown(*whole)
        [call] = calls
    except (TypeError, ValueError, AttributeError):
        return launcher, whole, None
    begin = _STREAM + 1
    wanted = [*head[:begin], *own]
    for behind in (None, len(call) - 1):
        if behind is not None and not isinstance(call[behind], tuple):
            continue
        args = _flat(call, behind)
        same = [*args[:begin], *args[max(len(args) - len(own), begin) :]]
        if len(same) == len(wanted) and all(x is y for x, y in zip(same, wanted, strict=True)):
            return launcher.launch, args, behind
    return launcher, whole, None


def _flat(args: Sequence[Any], behind: int | None) -> list[Any]:
    """The arguments, with those of a tuple behind so many others in its place."""
    return list(args) if behind is None else [*args[:behind], *args[behind]]


def _passed(function: Any, behind: int | None) -> Any:
    """``function`` of flat arguments."""
    if behind is None:
        return function
    return lambda *args: function(*args[:behind], args[behind:])


def _unwrapped(
    run: Any, args: list[Any], behind: int | None
) -> tuple[Any, Callable[..., Sequence[Any]] | None, Sequence[int]]:
    """The function in C that ``run`` calls for these, what tells its arguments, and where each is.

    For kernels that take descriptors, Triton has Python around it that goes through all arguments
    and encodes the descriptors.  A copy of it shows the call.  Where it does anything else, ``run``
    stays.

    Args:
        run: takes the arguments behind so many others as one tuple, as the function in C does.
    """
    same = _passed(run, behind), None, range(len(args))
    names = getattr(getattr(run, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(run, "__closure__", None) or (), strict=True))
    inner = cells.get("launcher")
    if inner is None:
        return same
    cells["launcher"] = CellType(lambda *final: _flat(final, behind))
    shown = FunctionType(run.__code__, run.__globals__, closure=tuple(cells.values()))
    expand = _passed(shown, behind)
    places: list[int] = []
    wanted: list[Any] = []
    try:
        final = expand(*args)
        for value in args:
            places.append(len(wanted))
            rest = [*value.shape, *value.strides] if _is_descriptor(value) else None
            wanted += [value] if rest is None else [final[len(wanted)], *rest]
    except (TypeError, ValueError, AttributeError, IndexError):
        return same
    if len(final) != len(wanted) or any(x is not y for x, y in zip(final, wanted, strict=True)):
        return same
    return _passed(inner.cell_contents, behind), expand, places


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()

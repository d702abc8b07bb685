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
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from triton import knobs

from sparsek_kernels.common.device import current_stream

Tensors = tuple[torch.Tensor | None, ...]

_state = threading.local()


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel``; a recording of this thread that is going on keeps the launch."""
    compiled = kernel[grid](*args, **options)
    record: Recording | None = getattr(_state, "record", None)
    if record is not None:
        record.add(kernel, compiled, grid, args, options)


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
_MOST_FORMS, _MOST_MAPS = 1024, 4096
"""Descriptors that differ in more than their address, and addresses of one of them."""


_Place = tuple[int, int, int]
"""An argument that a replay exchanges: its index, that of a tensor, and bytes behind its start."""


class _Maps(dict[int, Any]):
    """What one descriptor is to a launch, by the address of its matrix; all else is the same.

    Args:
        make: what it is at an address.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MOST_MAPS:
            self.clear()
        found = self[address] = self._make(address)
        return found


_forms: dict[Hashable, _Maps] = {}
"""By launcher, argument and what a descriptor has beside its address: layers and steps share it."""


class _Launch(NamedTuple):
    """A function that launches a kernel, its arguments, and which of them a replay exchanges."""

    run: Any
    args: list[Any]
    pointers: Sequence[_Place]
    described: Sequence[tuple[int, int, int, _Maps]]


@dataclass(frozen=True, slots=True)
class _Address:
    """The base of a descriptor, of which launches ask nothing but the address."""

    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Recording:
    """Launches so far, and whether they can be replayed."""

    def __init__(self, tensors: Tensors) -> None:
        self._addresses: dict[int, list[int]] = defaultdict(list)
        self._storages: dict[int, list[int]] = defaultdict(list)
        self._starts = [0 if x is None else x.data_ptr() for x in tensors]
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                self._addresses[self._starts[index]].append(index)
                self._storages[_storage(tensor)].append(index)
        self._launches: list[_Launch] = []
        self._kept: list[torch.Tensor] = []
        self._usable = True
        self.ambiguous = False
        """Whether an argument may be several of the tensors: views of one storage."""

    def add(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Keep one launch; ``compiled`` is ``None`` in the interpreter, which replays nothing."""
        if compiled is None:
            self._usable = False
        if not self._usable:
            return
        head = (compiled.function, compiled.packed_metadata, None, None, None)
        own = [*args, *(options[name] for name in kernel.arg_names[len(args) :])]
        launcher, bound = _shortest(compiled.run, [*(*grid, 1, 1)[:_STREAM], None, *head], own)
        pointers: list[_Place] = []
        described: list[_Place] = []
        for index, value in enumerate(bound):
            is_descriptor = hasattr(value, "block_shape")
            tensor = value.base if is_descriptor else value
            if not isinstance(tensor, torch.Tensor):
                continue
            address = tensor.data_ptr()
            place = self._find(index, tensor, address)
            if place is None:
                self._kept.append(tensor)
            else:
                (described if is_descriptor else pointers).append(place)
            bound[index] = _moved(value, address) if is_descriptor else address
        self._launches.append(_prepared(compiled.run, launcher, bound, pointers, described))

    def _find(self, argument: int, tensor: torch.Tensor, address: int) -> _Place | None:
        """The exchanged tensor that an argument is, or lies in; ``None`` for any other."""
        same = self._addresses.get(address) or self._storages.get(_storage(tensor))
        if not same:
            return None
        if len(same) > 1:  # which of them the argument follows cannot be told
            self._usable, self.ambiguous = False, True
        return argument, same[0], address - self._starts[same[0]]

    def finish(self) -> Replay | None:
        """The launches; ``None`` where they cannot be replayed, or there were none."""
        if not self._usable or not self._launches:
            return None
        return Replay(self._launches, self._kept)


@dataclass(frozen=True)
class Replay:
    """Recorded launches, with what they need besides the exchanged tensors.

    Args:
        launches: in order.
        kept: tensors whose addresses the launches have; they live as long as the replay.
    """

    launches: Sequence[_Launch]
    kept: Sequence[torch.Tensor] = field(repr=False)

    def __call__(self, tensors: Tensors, device: int) -> None:
        """Launch everything on the device's current stream, on these tensors."""
        self.launch([0 if x is None else x.data_ptr() for x in tensors], current_stream(device))

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch everything on tensors at these addresses; that of ``None`` is 0."""
        for run, prepared, pointers, described in self.launches:
            args = prepared.copy()
            args[_STREAM] = stream
            for index, tensor, offset in pointers:
                args[index] = addresses[tensor] + offset
            for index, tensor, offset, maps in described:
                args[index] = maps[addresses[tensor] + offset]
            run(*args)


def _prepared(
    key: Hashable, launcher: Any, args: list[Any], pointers: list[_Place], described: list[_Place]
) -> _Launch:
    """The launch of ``launcher(*args)``, whose descriptors are encoded once for each address.

    Args:
        key: the kernel's own.
        launcher, args: what launches, and on what; no tensors.
        pointers, described: the arguments that a replay exchanges.
    """
    run, expand, places = _unwrapped(launcher, args)

    def maps_of(index: int) -> _Maps:
        own, place = args[index], places[index]
        rest = (tuple(own.shape), tuple(own.strides), tuple(own.block_shape), own.padding)
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        form = (key, index, *rest)
        if form not in _forms:
            _forms[form] = _Maps(lambda address: expand(*_moved_all(args, address))[place])
        return _forms[form]

    return _Launch(
        run,
        list(expand(*args)),
        [(places[index], *rest) for index, *rest in pointers],
        [(places[index], *rest, maps_of(index)) for index, *rest in described],
    )


def _moved_all(args: Sequence[Any], address: int) -> list[Any]:
    """Arguments of a launch, with all descriptors at one address."""
    return [_moved(x, address) if hasattr(x, "block_shape") else x for x in args]


def _moved(descriptor: Any, address: int) -> Any:
    """A descriptor of the same matrix at another address."""
    moved = copy.copy(descriptor)
    moved.base = _Address(address)
    return moved


def _shortest(launcher: Any, head: list[Any], own: list[Any]) -> tuple[Any, list[Any]]:
    """What launches in the end, and its arguments, which end with the kernel's ``own``.

    Triton's launcher is in Python and spends half a microsecond before it calls a function in C.  A
    copy of it shows that call.  Where the launcher does more, or ends otherwise, it stays.
    """
    whole = [*head, *own]
    if any(getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile")):
        return launcher, whole
    calls: list[tuple[Any, ...]] = []
    shown = copy.copy(launcher)
    shown.launch = lambda *args: calls.append(args)
    try:
        shown(*whole)
        [call] = calls
    except (TypeError, ValueError, AttributeError):
        return launcher, whole
    begin = _STREAM + 1
    same = [*call[:begin], *call[max(len(call) - len(own), begin) :]]
    wanted = [*head[:begin], *own]
    if len(same) != len(wanted) or any(x is not y for x, y in zip(same, wanted, strict=True)):
        return launcher, whole
    return launcher.launch, list(call)


def _unwrapped(
    run: Any, args: list[Any]
) -> tuple[Any, Callable[..., Sequence[Any]], Sequence[int]]:
    """The function in C that ``run(*args)`` calls, what tells its arguments, and where each is.

    For kernels that take descriptors, Triton has Python around it that goes through all arguments
    and encodes the descriptors.  A copy of it shows the call.  Where it does anything else, ``run``
    stays.
    """

    def shown(*final: Any) -> Sequence[Any]:
        return final

    same = run, shown, range(len(args))
    names = getattr(getattr(run, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(run, "__closure__", None) or (), strict=True))
    inner = cells.get("launcher")
    if inner is None:
        return same
    cells["launcher"] = CellType(shown)
    expand = FunctionType(run.__code__, run.__globals__, closure=tuple(cells.values()))
    places: list[int] = []
    wanted: list[Any] = []
    try:
        final = expand(*args)
        for value in args:
            places.append(len(wanted))
            own = [value]
            if hasattr(value, "block_shape"):
                own = [final[len(wanted)], *value.shape, *value.strides]
            wanted += own
    except (TypeError, ValueError, AttributeError, IndexError):
        return same
    if len(final) != len(wanted) or any(x is not y for x, y in zip(final, wanted, strict=True)):
        return same
    return inner.cell_contents, expand, places


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

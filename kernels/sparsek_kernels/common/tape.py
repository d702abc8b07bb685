"""Calls that are recorded once, with what they allocate and run, and replayed on other tensors.

A pass of a sparse layer allocates some thirty tensors, runs a few torch operations and launches ten
kernels.  From Python that takes longer than the kernels of a short sequence.  What it does follows
from how its tensors lie, so the second pass of a kind is recorded, and later ones repeat it::

    out, lse = replayed((q, k, v), options, compute)    # compute() is called twice for each kind

``compute`` must not look at what tensors hold.  Its results are tensors that it allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek_kernels.common.device import (
    REFUSALS,
    autocasts,
    current_device,
    current_stream,
    dispatch_modes,
)
from sparsek_kernels.common.recording import (
    Launch,
    Recording,
    compiles,
    has_launch_hook,
    recording,
    storage_of,
)

Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

_MOST_TAPES = 256
_MOST_ELEMENTS = 1 << 27
"""Largest tensor of a call that is replayed: with larger ones the GPU is the slower side."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor in a recorded argument.

    A replay has a list of tensors: those that it is given come first, those that it makes behind
    them.  ``place`` is the index in that list.
    """

    place: int


class _Call(NamedTuple):
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
    if isinstance(value, _Slot):
        return tensors[value.place]
    if isinstance(value, list):
        return [_filled(x, tensors) for x in value]
    return value


def _where(x: torch.Tensor) -> Hashable:
    """Where a tensor lies, and how."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


class _Tape(TorchDispatchMode):
    """Notes torch operations in between the launches of a recording."""

    def __init__(self, tensors: Sequence[torch.Tensor], record: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._alive: list[Any] = [*tensors]  # an id is that of one tensor, an address too
        self._slots = {id(x): i for i, x in enumerate(tensors)}
        self._given = {_where(x): i for i, x in enumerate(tensors)}
        self.num_slots = len(tensors)
        self.steps: list[_Call | Launch] = []
        self.usable = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.follow_launches()
        with self._record.deaf():  # what launches within is replayed as the operation that it is
            found = func(*args, **(kwargs or {}))
        results = [*found] if isinstance(found, list | tuple) else [found]
        if not all(isinstance(x, torch.Tensor) for x in results):
            self.usable = False  # something that the host has read
            return found
        storages = {storage_of(x) for x in args if isinstance(x, torch.Tensor)}
        in_place = any(id(x) in self._slots for x in results)
        is_view = not in_place and not storages.isdisjoint(map(storage_of, results))
        reads: set[int] = set()
        given = [self._slotted(x, reads) for x in args]
        options = {name: self._slotted(x, reads) for name, x in (kwargs or {}).items()}
        places = [self._place(x, is_view) for x in results]
        self.steps.append(_Call(func, given, options, places, is_view, reads))
        return found

    def follow_launches(self) -> None:
        """Take the launches since the latest operation."""
        self.steps += self._record.launches
        self._record.launches.clear()

    def _slotted(self, value: Any, reads: set[int]) -> Any:
        """An argument with slots in the place of tensors, which are noted among ``reads``."""
        if isinstance(value, list | tuple):
            return [self._slotted(x, reads) for x in value]
        if not isinstance(value, torch.Tensor):
            return value
        place = self._slots.get(id(value), self._given.get(_where(value)))
        if place is None:  # neither given nor made: nobody knows when it changes
            self.usable = False
            return value
        reads.add(place)
        return _Slot(place)

    def _place(self, tensor: torch.Tensor, is_view: bool) -> int:
        """The slot of a result; launches find views in the tensors that they are of."""
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = self.num_slots
            self._alive.append(tensor)
            if not is_view:
                self._record.follow(tensor, self.num_slots)
            self.num_slots += 1
        return self._slots[id(tensor)]

    def slot_of(self, result: torch.Tensor) -> int:
        """The slot of what the call returns."""
        return self._slots[id(result)]


class _Step(NamedTuple):
    """What a replay does next, and the slots that it needs no more afterwards."""

    action: _Call | Launch
    done: list[int]


class _Replay:
    """A call that can be repeated.

    Args:
        tape: what it did.
        num_given: tensors that it was given.
        results: what it returned.
    """

    def __init__(self, tape: _Tape, num_given: int, results: Tensors) -> None:
        self._results = [tape.slot_of(x) for x in results]
        self._num_made = tape.num_slots - num_given
        wanted = {*self._results}
        kept: list[tuple[_Call | Launch, set[int]]] = []
        for action in reversed(tape.steps):
            if isinstance(action, Launch):
                reads = {x[1] for x in action.pointers} | {x[1] for x in action.described}
            elif action.is_view and wanted.isdisjoint(action.results):
                continue  # of use to launches alone, which find it by its address
            else:
                reads = action.reads | (set() if action.is_view else {*action.results})
            # The first time from behind is the last use.
            kept.append((action, {x for x in reads - wanted if x >= num_given}))
            wanted |= reads
        self.steps = [_Step(action, sorted(done)) for action, done in reversed(kept)]

    def __call__(self, given: Sequence[torch.Tensor], device: int) -> Tensors:
        tensors: list[Any] = [*given, *[None] * self._num_made]
        addresses = [*(x.data_ptr() for x in given), *[0] * self._num_made]
        stream = current_stream(device)
        for action, done in self.steps:
            if isinstance(action, Launch):
                action.on(addresses, stream)
            else:
                action.on(tensors, addresses)
            for place in done:
                tensors[place] = None
        return tuple(tensors[x] for x in self._results)


_replays: dict[Hashable, _Replay | Literal[False] | None] = {}
"""By kind of call; ``None`` for one that cannot be replayed, ``False`` for one that was seen once:
a length that never comes again is not worth a recording."""


def replayed(
    tensors: Sequence[torch.Tensor | None], options: Hashable, compute: Callable[[], Tensors]
) -> Tensors:
    """``compute()``, or the same done again on these tensors without its Python.

    Args:
        tensors: all that ``compute`` reads.
        options: what else its launches depend on.
        compute: allocates its results, and fills them by launches through ``recording.run`` and by
            torch operations.
    """
    device = current_device()
    different: dict[Hashable, torch.Tensor] = {}
    kinds: list[Hashable] = [device, options, autocasts()]
    for x in tensors:
        if x is None:
            kinds.append(None)
            continue
        address = x.data_ptr()
        if x.get_device() != device or not 0 < x.numel() <= _MOST_ELEMENTS:
            return compute()
        place = (address, x.shape, x.stride(), x.dtype)
        known = place in different
        kinds += (list(different).index(place),) if known else (*place[1:], address % 16)
        different.setdefault(place, x)
    if (
        dispatch_modes()
        or has_launch_hook()
        or compiles()
        or torch.cuda.is_current_stream_capturing()
    ):
        return compute()
    key = tuple(kinds)
    given = [*different.values()]
    if key not in _replays:
        if len(_replays) >= _MOST_TAPES:
            _replays.clear()
        _replays[key] = False
        return compute()
    found = _replays[key]
    if found:
        try:
            return found(given, device)
        except REFUSALS as error:
            logger.warning("no replay, which costs host time: Triton's launcher says %s", error)
            _replays[key] = None
    if found is False:
        _replays[key] = None
        with suppress(torch.OutOfMemoryError):  # all scratch stays alive while it is recorded
            results, _replays[key] = recorded(given, compute)
            return results
    return compute()


def recorded(
    given: list[torch.Tensor], compute: Callable[[], Tensors]
) -> tuple[Tensors, _Replay | None]:
    """What ``compute`` returns, and how to repeat it; ``None`` where that cannot be."""
    with recording(tuple(given)) as record, _Tape(given, record) as tape:
        results = compute()
    tape.follow_launches()
    if not (record.usable and tape.usable) or record.kept:
        return results, None
    return results, _Replay(tape, len(given), results)

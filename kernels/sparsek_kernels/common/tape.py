"""Calls that are recorded once, with what they allocate and run, and replayed on other tensors.

A pass of a sparse layer allocates some thirty tensors, runs a few torch operations and launches ten
kernels.  From Python that takes longer than the kernels of a short sequence.  What it does follows
from how its tensors lie, so the second pass of a kind is recorded, and later ones repeat it::

    out, lse = replayed((q, k, v), options, compute)    # compute() is called twice for each kind

``compute`` must not look at what tensors hold.  Its results are tensors that it allocated.  Where
only kernels read and write a tensor, its memory need not be a tensor's in a replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek_kernels.common.device import REFUSALS, autocasts, current_device, dispatch_modes
from sparsek_kernels.common.recording import (
    Recording,
    compiles,
    has_launch_hook,
    recording,
    storage_of,
)
from sparsek_kernels.common.tape_replay import Replay, Step
from sparsek_kernels.common.tape_steps import ALLOCATIONS, Call, New, Slot

Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

_MOST_TAPES = 1024  # some twelve for each length of a layer that trains
_MOST_ELEMENTS = 1 << 27
"""Largest tensor of a call that is replayed: with larger ones the GPU is the slower side."""


def _where(x: torch.Tensor) -> Hashable:
    """Where a tensor lies, and how."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


class _Tape(TorchDispatchMode):
    """Notes torch operations in between the launches of a recording."""

    def __init__(self, tensors: Sequence[torch.Tensor], record: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._alive: list[Any] = [*tensors]  # an id is that of one tensor, an address too
        self._num_given = len(tensors)
        self._slots = {id(x): i for i, x in enumerate(tensors)}
        self._given = {_where(x): i for i, x in enumerate(tensors)}
        self.num_slots = len(tensors)
        self.steps: list[Step] = []
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
        if func in ALLOCATIONS and found.is_contiguous():
            place = self._place(found, is_view=False)
            new = New(ALLOCATIONS[func], found.shape, found.dtype, found.device, place)
            self.steps.append(new)
            return found
        if func is torch.ops.aten.detach.default and self._is_made(args[0]):
            self._slots[id(found)] = self._slots[id(args[0])]  # it has no gradient
            self._alive.append(found)
            return found
        storages = {storage_of(x) for x in args if isinstance(x, torch.Tensor)}
        in_place = any(id(x) in self._slots for x in results)
        is_view = not in_place and not storages.isdisjoint(map(storage_of, results))
        reads: set[int] = set()
        given = [self._slotted(x, reads) for x in args]
        options = {name: self._slotted(x, reads) for name, x in (kwargs or {}).items()}
        places = [self._place(x, is_view) for x in results]
        self.steps.append(Call(func, given, options, places, is_view, reads))
        return found

    def _is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the call made it."""
        return self._slots.get(id(tensor), -1) >= self._num_given

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
        return Slot(place)

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


_replays: dict[Hashable, Replay | Literal[False] | None] = {}
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
    found = _replays.get(key)  # another thread may have cleared them
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
) -> tuple[Tensors, Replay | None]:
    """What ``compute`` returns, and how to repeat it; ``None`` where that cannot be."""
    with recording(tuple(given)) as record, _Tape(given, record) as tape:
        results = compute()
    tape.follow_launches()
    if not (record.usable and tape.usable) or record.kept:
        return results, None
    found = [tape.slot_of(x) for x in results]
    return results, Replay(tape.steps, len(given), tape.num_slots, found)

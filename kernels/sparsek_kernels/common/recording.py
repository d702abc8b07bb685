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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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


_Place = tuple[int, int, int]
"""An argument that a replay exchanges: its index, that of a tensor, and bytes behind its start."""
_STREAM = 3
"""Index of the stream in what a launcher takes, after the grid."""


@dataclass(frozen=True)
class _Launch:
    """A function that launches a kernel, its arguments, and which of them a replay exchanges."""

    run: Any
    args: list[Any]
    pointers: tuple[_Place, ...]
    descriptors: tuple[_Place, ...]


@dataclass(frozen=True)
class _Address:
    """The base of a descriptor, of which launches ask nothing but the address."""

    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Recording:
    """Launches so far, and whether they can be replayed."""

    def __init__(self, tensors: Tensors) -> None:
        self._addresses = [None if x is None else x.data_ptr() for x in tensors]
        self._storages = [None if x is None else _storage(x) for x in tensors]
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
        descriptors: list[_Place] = []
        for index, value in enumerate(bound):
            described = hasattr(value, "block_shape")
            tensor = value.base if described else value
            if not isinstance(tensor, torch.Tensor):
                continue
            place = self._find(index, tensor)
            if place is None:
                self._kept.append(tensor)
                bound[index] = value if described else tensor.data_ptr()
            else:
                (descriptors if described else pointers).append(place)
        self._launches.append(_Launch(launcher, bound, tuple(pointers), tuple(descriptors)))

    def _find(self, argument: int, tensor: torch.Tensor) -> _Place | None:
        """The exchanged tensor that an argument is, or lies in; ``None`` for any other."""
        address = tensor.data_ptr()
        same = [i for i, start in enumerate(self._addresses) if start == address]
        if not same:
            storage = _storage(tensor)
            same = [i for i, other in enumerate(self._storages) if other == storage]
        if not same:
            return None
        if len(same) > 1:  # which of them the argument follows cannot be told
            self._usable, self.ambiguous = False, True
        return argument, same[0], address - (self._addresses[same[0]] or 0)

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
        for launch in self.launches:
            args = launch.args.copy()
            args[_STREAM] = stream
            for index, tensor, offset in launch.pointers:
                args[index] = addresses[tensor] + offset
            for index, tensor, offset in launch.descriptors:
                moved = args[index] = copy.copy(args[index])
                moved.base = _Address(addresses[tensor] + offset)
            launch.run(*args)


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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""Recorded steps, repeated on other tensors.

Scratch that nothing but kernels read and write is one allocation, in which tensors that are needed
at different times lie at the same place; what has to be zero beforehand is another.  Both are freed
after the last launch that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sparsek_kernels.common.block import Need, offsets_in_block
from sparsek_kernels.common.device import current_stream
from sparsek_kernels.common.recording import Launch
from sparsek_kernels.common.tape_steps import Call, New

Step = New | Call | Launch


class _Timed(NamedTuple):
    """What a replay does next, and the slots that it needs no more afterwards."""

    action: Step
    done: list[int]


class _Block(NamedTuple):
    """An allocation of bytes, and the slots that lie in it with their offsets."""

    make: Callable[..., torch.Tensor]
    size: int
    device: torch.device
    offsets: list[tuple[int, int]]


class Replay:
    """A call that can be repeated.

    Args:
        steps: what it did.
        num_given: tensors that it was given.
        num_slots: those, and what it made.
        results: slots of what it returns.
    """

    def __init__(
        self, steps: Sequence[Step], num_given: int, num_slots: int, results: Sequence[int]
    ) -> None:
        self._results, self._num_made = results, num_slots - num_given
        kept = _needed(steps, results)
        uses: dict[int, list[int]] = {}
        for time, (_, places) in enumerate(kept):
            for place in places:
                uses.setdefault(place, []).append(time)
        seen = {*results}.union(*(places for step, places in kept if isinstance(step, Call)))
        scratch = [
            step
            for step, _ in kept
            if isinstance(step, New) and step.place not in seen and step.nbytes
        ]
        self._blocks = [
            _block([x for x in scratch if x.make is make], uses)
            for make in {x.make for x in scratch}
        ]
        away = {step.place for step in scratch}
        done: dict[int, list[int]] = {}
        for place, times in uses.items():
            if place >= num_given and place not in away and place not in results:
                done.setdefault(times[-1], []).append(place)
        for slot, block in enumerate(self._blocks, num_slots):  # blocks come behind the rest
            last = max(uses[place][-1] for place, _ in block.offsets)
            done.setdefault(last, []).append(slot)
        self.steps = [
            _Timed(step, sorted(done.get(time, ())))
            for time, (step, _) in enumerate(kept)
            if not (isinstance(step, New) and step.place in away)
        ]

    def __call__(self, given: Sequence[torch.Tensor], device: int) -> tuple[torch.Tensor, ...]:
        """Do everything on the device's current stream, on these tensors."""
        tensors: list[Any] = [*given, *[None] * self._num_made]
        addresses = [*(x.data_ptr() for x in given), *[0] * self._num_made]
        for block in self._blocks:
            tensors.append(block.make(block.size, dtype=torch.uint8, device=block.device))
            start = tensors[-1].data_ptr()
            for place, offset in block.offsets:
                addresses[place] = start + offset
        stream = current_stream(device)
        for action, done in self.steps:
            if isinstance(action, Launch):
                action.on(addresses, stream)
            else:
                action.on(tensors, addresses)
            for place in done:
                tensors[place] = None
        return tuple(tensors[x] for x in self._results)


def _needed(steps: Sequence[Step], results: Sequence[int]) -> list[tuple[Step, set[int]]]:
    """The steps that do something, and the slots that each reads or writes."""
    wanted = {*results}
    kept: list[tuple[Step, set[int]]] = []
    for step in reversed(steps):
        places: set[int] = set()
        if isinstance(step, Launch):
            places = {x[1] for x in step.pointers} | {x[1] for x in step.described}
        elif isinstance(step, Call):
            if step.is_view and wanted.isdisjoint(step.results):
                continue  # of use to launches alone, which find it by its address
            places = step.reads | (set() if step.is_view else {*step.results})
        elif step.place not in wanted:
            continue
        kept.append((step, places))
        wanted |= places
    return kept[::-1]


def _block(scratch: Sequence[New], uses: dict[int, list[int]]) -> _Block:
    """Scratch in one block; tensors of zeros share nothing, because they are filled at once."""
    make, device = scratch[0].make, scratch[0].device
    needs = []
    for new in scratch:
        times = uses[new.place] if make is torch.empty else [0, len(uses)]
        needs.append(Need(new.nbytes, times[0], times[-1]))
    offsets, size = offsets_in_block(needs)
    places = [new.place for new in scratch]
    return _Block(make, size, device, list(zip(places, offsets, strict=True)))

"""Keys that ``min_mass`` leaves out: what a step attends is known once its kernels have run.

Kernels add to counters on the device.  These are copied to the host once in a while, and nothing
waits for a copy: steps join the totals when one that covers them has arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

COPY_INTERVAL = 1.0
"""Seconds between two copies of a GPU's counters."""

Counts = list[tuple[int, torch.Tensor]]
"""KV heads, and a counter of layers that have as many."""


@dataclass(frozen=True)
class _Copy:
    """Counters on their way to the host, and the steps that they cover."""

    counts: Counts
    event: torch.cuda.Event | None
    attended: float
    context: float


@dataclass
class LeftOut:
    """The counters of this process, and the steps that wait for them.

    A counter is the argument ``left_out`` of :func:`sparsek_kernels.paged.paged_attention`.  It has
    a row for prefills and one for decodes: keys left out, and keys that lists have places for.
    """

    _counters: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    _waiting: tuple[float, float] = (0.0, 0.0)
    _copy: _Copy | None = None
    _copied: float = float("-inf")
    _told: float = 0.0
    _built: set[int] = field(default_factory=set)

    def counter(self, device: torch.device, heads: int) -> torch.Tensor:
        """``[2, 2]`` int64 for layers with ``heads`` KV heads, which their kernels add to.

        It is made once and never freed.  A CUDA graph that is being captured must find it made.
        """
        key = (device, heads)
        if key not in self._counters:
            with torch.inference_mode(False):
                self._counters[key] = torch.zeros(2, 2, dtype=torch.int64, device=device)
        return self._counters[key]

    def total(self) -> torch.Tensor:
        """``[2, 2]`` float64, all counts so far, each a mean over KV heads; waits for a GPU."""
        return _mean([(heads, counter.cpu()) for (_, heads), counter in self._counters.items()])

    def settle(self, builder: int, attended: float, context: float) -> tuple[float, float]:
        """Add a step that is about to run; returns what earlier ones attended, and their context.

        Every step is told once, together with others, after it ran; (0, 0) where none is due.

        Args:
            builder: who builds the step.  Each group of layers has one: when one of them builds
                again, all that was built before has been launched.
            attended: keys that the step attends if no list is short.
            context: keys that dense attention would attend.
        """
        found = (0.0, 0.0)
        if builder in self._built:
            self._built.clear()
            if self._copy is None and self._is_due():
                self._start()
            found = self._collect()
        self._built.add(builder)
        self._waiting = self._waiting[0] + attended, self._waiting[1] + context
        return found

    def finish(self) -> tuple[float, float]:
        """Attended keys and context of all steps that were not told yet; waits for a GPU."""
        first = self._collect(wait=True)
        self._start()
        rest = self._collect(wait=True)
        return first[0] + rest[0], first[1] + rest[1]

    @property
    def _on_gpu(self) -> bool:
        return any(device.type != "cpu" for device, _ in self._counters)

    def _is_due(self) -> bool:
        return not self._on_gpu or time.monotonic() - self._copied >= COPY_INTERVAL

    def _start(self) -> None:
        counts = [
            (heads, counter.to("cpu", non_blocking=True, copy=True))
            for (_, heads), counter in self._counters.items()
        ]
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._copy = _Copy(counts, event, *self._waiting)
        self._waiting = (0.0, 0.0)
        self._copied = time.monotonic()

    def _collect(self, *, wait: bool = False) -> tuple[float, float]:
        copy = self._copy
        if copy is None:
            return 0.0, 0.0
        if copy.event is not None:
            if wait:
                copy.event.synchronize()
            elif not copy.event.query():
                return 0.0, 0.0
        self._copy = None
        total = float(_mean(copy.counts)[:, 0].sum())
        attended = max(copy.attended - (total - self._told), 0.0)
        self._told = total
        return attended, copy.context


def _mean(counts: Counts) -> torch.Tensor:
    found = torch.zeros(2, 2, dtype=torch.float64)
    for heads, counter in counts:
        found += counter / heads
    return found


LEFT_OUT = LeftOut()
"""The counters of this process."""

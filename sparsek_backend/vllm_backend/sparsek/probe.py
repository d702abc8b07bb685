"""How long prefills take to choose their blocks: one layer's, every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sparsek_backend.vllm_backend.stats import STATS
from sparsek_kernels.paged import Chosen

INTERVAL = 10.0
"""Seconds between two timed prefills."""


class SelectionProbe:
    """Times a prefill of one layer: choosing, and choosing and attending together.

    Nothing waits for a GPU: it notes the times itself, and a later prefill reads them.
    """

    def __init__(self) -> None:
        self._last = float("-inf")
        self._noted: tuple[torch.cuda.Event, ...] = ()

    def is_due(self, device: torch.device) -> bool:
        """Whether to time the present prefill; reads the last one's times where they are known."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        if self._noted and self._noted[-1].query():
            first, chosen, last = self._noted
            _add(first.elapsed_time(chosen) / 1000, first.elapsed_time(last) / 1000)
            self._noted = ()
        return not self._noted and time.monotonic() - self._last >= INTERVAL

    def run(
        self, select: Callable[[], Chosen], attend: Callable[[Chosen], None], device: torch.device
    ) -> None:
        """Choose, attend what was chosen, and time both."""
        self._last = time.monotonic()
        if device.type == "cuda":
            noted = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            noted[0].record()
            found = select()
            noted[1].record()
            attend(found)
            noted[2].record()
            self._noted = noted
            return
        first = time.perf_counter()
        found = select()
        chosen = time.perf_counter()
        attend(found)
        _add(chosen - first, time.perf_counter() - first)


def _add(selection: float, attention: float) -> None:
    """Count the seconds to choose, and to choose and attend."""
    STATS.selection_seconds += selection
    STATS.attention_seconds += attention


PROBE = SelectionProbe()
"""The probe of this process."""

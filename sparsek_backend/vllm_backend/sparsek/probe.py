"""How long prefills take to choose their blocks: one layer's, every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sparsek_backend.vllm_backend.stats import STATS

INTERVAL = 10.0
"""Seconds between two timed prefills."""


class SelectionProbe:
    """Times a prefill of one layer, and its selection alone by a second run of it.

    That waits for a GPU, which is why it is rare.
    """

    def __init__(self) -> None:
        self._last = float("-inf")

    def is_due(self, device: torch.device) -> bool:
        """Whether to time the present prefill."""
        if time.monotonic() - self._last < INTERVAL:
            return False
        return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def run(
        self, select: Callable[[], object], attend: Callable[[], object], device: torch.device
    ) -> None:
        """Run ``select``, whose result is dropped, then ``attend``, and time both."""
        STATS.selection_seconds += _seconds(select, device)
        STATS.attention_seconds += _seconds(attend, device)
        self._last = time.monotonic()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def _nothing() -> None:
    """A CPU has done its work when a call returns."""


PROBE = SelectionProbe()
"""The probe of this process."""

"""Timing: interleaved providers, cold L2, CUDA graphs where a call can be captured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

TimingKind = Literal["cold", "graph", "eager"]
"""How a case is timed.

* `cold`: one call per sample, L2 flushed before it, replayed from a CUDA graph where possible.
* `graph`: many calls unrolled in one CUDA graph, its time divided by their number; caches warm.
  What a latency-bound call costs inside a captured model.
* `eager`: many calls back to back from Python, host overhead included; caches warm.
"""

_UNROLL = 50
_LONG_MS = 100.0
"""Samples beyond this bring a GPU to its power limit, and its clock down."""
_REST_S = 0.3
"""Pause before every sample of a case that has such samples: the clock is back up by then."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over `samples` samples; `method` says how they were taken."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    method: str


@dataclass(frozen=True)
class Timed:
    """A call that can be timed: `fn` runs `calls` of the provider's calls."""

    fn: Callable[[], object]
    calls: int
    method: str


def make_timed(
    fn: Callable[[], object], *, timing: str, device: torch.device, graph: bool
) -> Timed:
    """Wrap a provider's call for the chosen timing, capturing it in a CUDA graph if that is asked.

    Raises:
        RuntimeError: the call cannot be captured although `timing` is `graph`.
    """
    if device.type != "cuda":
        return Timed(fn, 1, "wall clock")
    if timing == "eager":
        return Timed(_repeat(fn, _UNROLL), _UNROLL, "eager, warm L2")
    calls = _UNROLL if timing == "graph" else 1
    if timing == "cold" and not graph:
        return Timed(fn, 1, "events, cold L2")
    try:
        replay = _capture(_repeat(fn, calls) if calls > 1 else fn)
    except RuntimeError:
        torch.cuda.synchronize()
        if timing == "graph":
            raise
        return Timed(fn, 1, "events, cold L2")
    return Timed(replay, calls, "graph, cold L2" if timing == "cold" else "graph, warm L2")


def time_interleaved(
    timed: Sequence[Timed],
    *,
    device: torch.device,
    budget_ms: float = 400.0,
    min_samples: int = 7,
    max_samples: int = 60,
) -> list[Timing]:
    """Time several calls, one sample of each in turn, so that drift hits all of them equally.

    Where any of them takes longer than 100 ms on a GPU, all rest for 0.3 s before every sample: a
    call would otherwise run at the clock that the call before it left.

    Args:
        budget_ms: time to spend on samples of all calls together; `min_samples` wins over it.
    """
    clock = _CudaClock(device) if device.type == "cuda" else _WallClock()
    for call in timed:
        call.fn()
    first = [clock.sample(call) for call in timed]
    rounds = int(budget_ms / max(sum(first), 1e-3))
    rounds = max(min_samples, min(rounds, max_samples))
    rest_s = _REST_S if device.type == "cuda" and max(first) > _LONG_MS else 0.0
    samples: list[list[float]] = [[] for _ in timed]
    for turn in range(rounds):
        for offset in range(len(timed)):
            index = (turn + offset) % len(timed)
            if rest_s:
                time.sleep(rest_s)
            samples[index].append(clock.sample(timed[index]))
    found = []
    for call, values in zip(timed, samples, strict=True):
        ordered = sorted(ms / call.calls for ms in values)
        median, low, high = (quantile(ordered, share) for share in (0.5, 0.2, 0.8))
        found.append(Timing(median, low, high, len(ordered), call.method))
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The sample that ``share`` of the ascending samples do not exceed; for a half the median."""
    if share == 0.5:
        return statistics.median(ordered)
    return ordered[round(share * (len(ordered) - 1))]


def _repeat(fn: Callable[[], object], calls: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(calls):
            fn()

    return run


def _capture(fn: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = fn()

    def replay(_kept: object = (fn, kept)) -> None:  # the graph reads memory that `fn` owns
        graph.replay()

    replay()
    torch.cuda.synchronize()
    return replay


class _CudaClock:
    """CUDA events around one call, after a read of far more than the L2 cache holds.

    It is a read because a write would leave the cache full of lines that the timed call has to wait
    for on their way to memory.  It also keeps the device busy while the host prepares the call, so
    that what Python costs does not appear as a gap.
    """

    def __init__(self, device: torch.device) -> None:
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._scratch = torch.zeros(max(size, 1 << 29) // 4, dtype=torch.float32, device=device)
        self._total = torch.zeros((), dtype=torch.float32, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def sample(self, call: Timed) -> float:
        """Milliseconds of `call.fn()` on the device."""
        torch.sum(self._scratch, dim=0, out=self._total)
        self._start.record()
        call.fn()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


class _WallClock:
    """The host's clock around one call."""

    def sample(self, call: Timed) -> float:
        begin = time.perf_counter()
        call.fn()
        return (time.perf_counter() - begin) * 1e3

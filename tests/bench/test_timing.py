"""Timing: turns, quantiles, and CUDA graphs that keep their inputs alive."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from sparsek_backend.bench import timing
from sparsek_backend.bench.timing import Timed, make_timed, time_interleaved

CPU = torch.device("cpu")


def test_providers_take_turns() -> None:
    order: list[str] = []

    def call(name: str) -> Timed:
        return Timed(lambda: order.append(name), 1, "test")

    timings = time_interleaved(
        [call("a"), call("b")], device=CPU, budget_ms=0.0, min_samples=4, max_samples=4
    )
    assert order[:4] == ["a", "b", "a", "b"]  # warm-up and first estimate
    assert order[4:] == ["a", "b", "b", "a"] * 2
    assert [timing.samples for timing in timings] == [4, 4]


@pytest.mark.parametrize(("slow_ms", "rests"), [(90.0, 0), (230.0, 8)])
def test_all_rest_where_one_is_long(
    slow_ms: float, rests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Clock:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def sample(self, call: Timed) -> float:
            events.append(call.method)
            return slow_ms if call.method == "slow" else 3.0

    monkeypatch.setattr(timing, "_CudaClock", Clock)
    monkeypatch.setattr(timing.time, "sleep", lambda _seconds: events.append("rest"))
    calls = [Timed(lambda: None, 1, name) for name in ("slow", "fast")]
    time_interleaved(calls, device=torch.device("cuda"), budget_ms=0.0, min_samples=4)
    assert events.count("rest") == rests
    if rests:
        assert events[2:] == [
            e for name in ["slow", "fast", "fast", "slow"] * 2 for e in ("rest", name)
        ]


def test_calls_unrolled_in_one_sample_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        taken = 0

        def sample(self, call: Timed) -> float:
            self.taken += 1
            return float(self.taken * call.calls)

    monkeypatch.setattr(timing, "_WallClock", Clock)
    calls = [Timed(lambda: None, 1, "one"), Timed(lambda: None, 20, "twenty")]
    one, twenty = time_interleaved(calls, device=CPU, budget_ms=0.0, min_samples=6)
    assert (one.samples, one.method, twenty.method) == (6, "one", "twenty")
    # Samples 1 and 2 only tell how long the calls take; then one and twenty, twenty and one, ...
    assert (one.p20_ms, one.median_ms, one.p80_ms) == (6.0, 8.5, 11.0)
    assert (twenty.p20_ms, twenty.median_ms, twenty.p80_ms) == (5.0, 8.5, 12.0)


@pytest.mark.gpu
@pytest.mark.parametrize("timing", ["cold", "graph"])
def test_a_graph_outlives_the_call_it_was_captured_from(timing: str) -> None:
    device = torch.device("cuda")
    out = torch.zeros(1 << 20, device=device)

    def prepare() -> Callable[[], object]:
        source = torch.full((1 << 20,), 3.0, device=device)
        return lambda: out.copy_(source)

    timed = make_timed(prepare(), timing=timing, device=device, graph=True)
    gc.collect()
    torch.full((1 << 20,), -1.0, device=device)  # lands in freed memory, if there is any
    out.zero_()
    timed.fn()
    assert "graph" in timed.method
    assert float(out.min()) == 3.0

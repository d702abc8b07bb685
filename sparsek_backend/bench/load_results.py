"""What `sparsek bench load` keeps of each answer, and the figures that are made of it.

The file is JSON lines: the plan, then a line for each request as it ends, and one for each rate
that is over. A rate without such a line was interrupted; measured again, its requests are the same.
Files of one plan may be put together as they are, one behind the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsek_backend.bench.loads import Limits
from sparsek_backend.bench.plan import PlanFile, Row
from sparsek_backend.bench.timing import quantile

PAST_ITS_BEST = 0.8
"""A backend's sweep ends after a rate whose goodput is less than this share of its best."""


@dataclass
class Answer:
    """One request: times in seconds since its rate began, prompts in tokens."""

    session: int  # number of its session
    turn: int  # number in the session
    prompt: int  # tokens of the prompt
    ideal: int  # those that a prefix cache without end would have
    due: float  # when it was sent
    first: float | None = None  # when its first token came; None if none did
    end: float = 0.0  # when its last token came, or when it was cut off
    tokens: int = 0  # tokens that came
    cached: int = 0  # prompt tokens that the server's prefix cache had
    finished: bool = False  # whether the answer is whole

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return float("inf") if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float:
        """Seconds per output token behind the first."""
        return (self.end - (self.first or 0.0)) / max(1, self.tokens - 1)

    def keeps(self, limits: Limits) -> bool:
        """Whether it came whole and in time."""
        first = limits.later if self.turn else limits.first
        return self.finished and self.ttft <= first and self.tpot <= limits.per_token


@dataclass
class Measured:
    """One backend at one rate; ``over`` is what the worker said when it was over, else empty."""

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    over: Mapping[str, Any] = field(default_factory=dict)

    def goodput(self, limits: Limits) -> float:
        """Requests a second that came whole and in time."""
        good = sum(answer.keeps(limits) for answer in self.answers.values())
        return good / float(self.over["seconds"])


Results = dict[tuple[str, float], Measured]
"""By backend and rate."""


class LoadFile(PlanFile):
    """What `sparsek bench load` keeps."""

    command = "load"

    def read(self) -> Results:
        """Everything that was measured; of a request that was measured twice the later."""
        results: Results = {}
        for line in self.lines():
            measured = results.setdefault((line.pop("backend"), line.pop("rate")), Measured())
            if "over" in line:
                measured.over = line["over"]
            else:
                answer = Answer(**line)
                measured.answers[answer.session, answer.turn] = answer
        return results


def next_rate(
    results: Results, backend: str, rates: Sequence[float], limits: Limits
) -> float | None:
    """The lowest rate that is left to measure, or None: all are, or the best is behind."""
    best = 0.0
    for rate in sorted(rates):
        measured = results.get((backend, rate))
        if measured is None or not measured.over:
            return rate
        goodput = measured.goodput(limits)
        best = max(best, goodput)
        if goodput < PAST_ITS_BEST * best:
            return None
    return None


def load_rows(results: Results, backends: Sequence[str], limits: Limits) -> list[Row]:
    """A row for each rate that is over; ``best`` marks the rate at which a backend does most.

    ``gain`` in such a row is its goodput over the best of the first backend.
    """
    rows = [
        _row(backend, rate, results[backend, rate], limits)
        for rate in sorted({rate for _, rate in results})
        for backend in backends
        if results.get((backend, rate), Measured()).over
    ]
    base: float | None = None
    for backend in backends:
        own = [row for row in rows if row["backend"] == backend]
        if not own:
            continue
        best = max(own, key=lambda row: float(row["goodput"]))
        base = base or best["goodput"] if backend == backends[0] else base
        best["best"] = True
        best["gain"] = best["goodput"] / base if base else None
    return rows


def _row(backend: str, rate: float, measured: Measured, limits: Limits) -> Row:
    """One backend at one rate; times in milliseconds, of whole answers."""
    whole = [answer for answer in measured.answers.values() if answer.finished]
    row: Row = {
        "backend": backend,
        "rate": rate,
        "requests": len(measured.answers),
        "answered": len(whole),
        "seconds": measured.over["seconds"],
        "throughput": len(whole) / measured.over["seconds"],
        "goodput": measured.goodput(limits),
        "best": False,
        "gain": None,
    }
    for kind in ("ttft", "tpot"):
        times = sorted(1e3 * getattr(answer, kind) for answer in whole)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            row[f"{kind}_{name}_ms"] = quantile(times, share) if times else None
    prompts = sum(answer.prompt for answer in whole) or 1
    return row | {
        "prompt_p50_tokens": statistics.median(x.prompt for x in whole) if whole else None,
        "output_p50_tokens": statistics.median(x.tokens for x in whole) if whole else None,
        "hit_share": sum(answer.cached for answer in whole) / prompts,
        "ideal_hit_share": sum(answer.ideal for answer in whole) / prompts,
        **measured.over,
    }

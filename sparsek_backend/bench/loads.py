"""Loads of a server: sessions of turns that arrive at random, drawn from a seed.

A document with its question is a session of one turn. The turns of an agent share a prefix that
grows: each prompt is the prompt before, its answer, and what a tool returned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsek_backend.bench.timing import quantile

_SHARES = {"p50": 0.5, "p10": 0.1, "p90": 0.9, "p99": 0.99, "most": 1.0}
LONGEST = 131072
"""Tokens of prompt and answer that no turn exceeds; a session ends before."""


@dataclass(frozen=True)
class Limits:
    """What a good answer keeps to."""

    first: float  # seconds to the first token of a session's first turn
    later: float  # the same of its later turns, whose prefix was computed before
    per_token: float  # seconds per output token behind the first, on average

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits: expected a positive {name}, got {value}")


@dataclass(frozen=True)
class Spread:
    """Log-normal numbers: their median, the deviation of their logarithm, their largest."""

    median: float
    deviation: float
    most: float

    def draw(self, numbers: random.Random) -> float:
        drawn = numbers.lognormvariate(math.log(self.median), self.deviation)
        return min(drawn, self.most)

    def scaled(self, share: float) -> Spread:
        """Numbers that are this share of these."""
        return Spread(self.median * share, self.deviation, self.most * share)


@dataclass(frozen=True)
class Load:
    """What sessions are drawn from."""

    start: Spread  # prompt tokens of a session's first turn
    added: Spread  # tokens that come behind an answer in the next turn's prompt
    output: Spread  # tokens of an answer
    think: Spread  # seconds from an answer to the session's next turn
    turns: tuple[int, int]  # fewest and most turns of a session
    shared: int  # tokens with which all sessions begin
    # turns at each rate, unless another number is asked for. Sessions of many turns take more than
    # a rate's time allows: at the end of a load that runs out there are too few of them.
    requests: int
    limits: Limits  # of good answers, unless others are asked for

    def scaled(self, share: float) -> Load:
        """The load with prompts and times to think that are this share."""
        if not 0 < share <= 1:
            raise ValueError(f"scale: expected a share of 1 at most, got {share}")
        return replace(
            self,
            start=self.start.scaled(share),
            added=self.added.scaled(share),
            think=self.think.scaled(share),
            shared=int(self.shared * share),
        )


def _documents(lengths: Spread, limits: Limits) -> Load:
    """Sessions of one question each, about a document of its own."""
    nothing = Spread(1, 0, 1)
    return Load(
        start=lengths,
        added=nothing,
        output=Spread(128, 0.25, 256),
        think=nothing,
        turns=(1, 1),
        shared=0,
        requests=60,
        limits=limits,
    )


LOADS = {
    "documents-32k": _documents(Spread(32768, 0.15, 49152), Limits(4.0, 4.0, 0.05)),
    "documents-128k": _documents(Spread(LONGEST - 256, 0, LONGEST - 256), Limits(30.0, 30.0, 0.1)),
    "agent": Load(
        start=Spread(54000, 0.35, 100000),
        added=Spread(2000, 1.0, 16000),
        output=Spread(400, 0.6, 2000),
        think=Spread(2, 1.0, 20),
        turns=(4, 8),
        shared=8192,
        requests=600,
        limits=Limits(first=7.0, later=2.5, per_token=0.05),
    ),
}


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    think: float  # seconds from the answer before to this turn; 0 in the first
    added: int  # tokens of its prompt behind the prompt before and its answer
    prompt: int  # tokens of its prompt
    output: int  # tokens of its answer
    cached: int  # tokens of its prompt that a prefix cache without end would have


@dataclass(frozen=True)
class Session:
    """Turns, the first of which comes at ``arrival``; the mean gap of sessions is 1."""

    arrival: float
    turns: tuple[Turn, ...]


def draw_sessions(load: Load, requests: int, seed: int = 0) -> list[Session]:
    """Sessions with so many turns together; more requests begin with the same sessions."""
    if requests < 1:
        raise ValueError(f"requests: expected a positive integer, got {requests}")
    sessions: list[Session] = []
    arrival = 0.0
    while requests > 0:
        numbers = random.Random(f"{seed} {len(sessions)}")
        turns = _draw_turns(load, numbers, load.shared if sessions else 0)[:requests]
        sessions.append(Session(arrival, tuple(turns)))
        arrival += numbers.expovariate(1.0)
        requests -= len(turns)
    return sessions


def _draw_turns(load: Load, numbers: random.Random, cached: int) -> list[Turn]:
    turns: list[Turn] = []
    prompt, think = 0, 0.0
    added = max(load.shared + 1, round(load.start.draw(numbers)))
    for _ in range(numbers.randint(*load.turns)):
        output = max(2, round(load.output.draw(numbers)))
        prompt += added
        if turns and prompt + output > LONGEST:
            break
        turns.append(Turn(think, added, prompt, output, cached))
        prompt += output
        cached = prompt - 1  # an answer's last token was never computed with
        think = load.think.draw(numbers)
        added = max(1, round(load.added.draw(numbers)))
    return turns


def describe_sessions(sessions: Sequence[Session]) -> dict[str, Any]:
    """Numbers of sessions and turns, the spread of their sizes, and the share of ideal hits."""
    turns = [turn for session in sessions for turn in session.turns]
    prompts = [turn.prompt for turn in turns]
    sizes: dict[str, list[float]] = {
        "prompt_tokens": [*prompts],
        "tokens_not_cached": [turn.prompt - turn.cached for turn in turns],
        "output_tokens": [turn.output for turn in turns],
        "think_s": [turn.think for session in sessions for turn in session.turns[1:]],
        "turns": [len(session.turns) for session in sessions],
    }
    return {
        "sessions": len(sessions),
        "requests": len(turns),
        "ideal_hit_share": sum(turn.cached for turn in turns) / sum(prompts),
        **{
            name: {of: quantile(sorted(values), share) for of, share in _SHARES.items()}
            for name, values in sizes.items()
            if values
        },
    }

"""Loads: what sessions are, what they are drawn from, and how many tokens an ideal cache has."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sparsek_backend.bench.loads import (
    LOADS,
    LONGEST,
    Limits,
    Session,
    Turn,
    describe_sessions,
    draw_sessions,
)


@pytest.mark.parametrize("name", LOADS)
def test_sessions_are_drawn_from_the_seed_alone(name: str) -> None:
    load = LOADS[name]
    few, many = (draw_sessions(load, requests, seed=3) for requests in (20, 60))
    assert sum(len(session.turns) for session in few) == 20
    assert many[: len(few) - 1] == few[:-1]
    assert draw_sessions(load, 20, seed=4) != few


def test_turns_of_an_agent_continue_what_was_said() -> None:
    load = LOADS["agent"]
    for number, session in enumerate(draw_sessions(load, 500)):
        first = session.turns[0]
        assert (first.think, first.cached) == (0, load.shared if number else 0)
        assert first.added == first.prompt > load.shared
        for before, turn in pairwise(session.turns):
            assert turn.prompt == before.prompt + before.output + turn.added
            assert turn.cached == before.prompt + before.output - 1
            assert turn.think > 0
        assert session.turns[-1].prompt + session.turns[-1].output <= LONGEST


def test_a_session_ends_before_the_longest_context() -> None:
    load = replace(LOADS["agent"], turns=(200, 200))
    session = draw_sessions(load, 200)[0]
    assert 1 < len(session.turns) < 200
    assert max(turn.prompt + turn.output for turn in session.turns) <= LONGEST


def test_long_run_statistics_are_those_that_the_docs_name() -> None:
    found = {name: describe_sessions(draw_sessions(load, 6000)) for name, load in LOADS.items()}
    agent, short, long = (found[n] for n in ("agent", "documents-32k", "documents-128k"))
    assert agent["prompt_tokens"]["p50"] == pytest.approx(64000, rel=0.05)
    assert agent["output_tokens"]["p50"] == pytest.approx(400, rel=0.05)
    assert agent["tokens_not_cached"]["p50"] == pytest.approx(2500, rel=0.1)
    assert agent["ideal_hit_share"] == pytest.approx(0.84, abs=0.01)
    assert short["prompt_tokens"]["p50"] == pytest.approx(32768, rel=0.02)
    assert long["prompt_tokens"]["p10"] == long["prompt_tokens"]["most"] == LONGEST - 256
    assert short["ideal_hit_share"] == long["ideal_hit_share"] == 0


def test_arrivals_are_one_unit_apart_on_average() -> None:
    sessions = draw_sessions(LOADS["documents-32k"], 4000)
    assert sessions[0].arrival == 0
    assert sessions[-1].arrival / 3999 == pytest.approx(1, rel=0.05)


def test_statistics_of_sessions_by_hand() -> None:
    sessions = [
        Session(0.0, (Turn(0, 100, 100, 10, 0), Turn(3, 5, 115, 20, 109))),
        Session(1.0, (Turn(0, 85, 85, 30, 50),)),
    ]
    found = describe_sessions(sessions)
    assert (found["sessions"], found["requests"]) == (2, 3)
    assert found["ideal_hit_share"] == (109 + 50) / (100 + 115 + 85)
    assert found["tokens_not_cached"]["p50"] == 35
    assert found["think_s"]["p50"] == found["think_s"]["most"] == 3
    assert found["turns"]["p50"] == 1.5


def test_a_smaller_load_has_shorter_prompts_and_as_long_answers() -> None:
    load = LOADS["agent"].scaled(0.01)
    found = describe_sessions(draw_sessions(load, 2000))
    assert load.shared == 81
    assert found["output_tokens"]["p50"] == pytest.approx(400, rel=0.1)
    assert found["think_s"]["p50"] == pytest.approx(0.02, rel=0.1)
    assert found["prompt_tokens"]["p10"] < 1000


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_scale_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="scale: expected a share"):
        LOADS["agent"].scaled(share)


def test_limits_and_requests_are_positive() -> None:
    with pytest.raises(ValueError, match="limits: expected a positive later"):
        Limits(1, 0, 1)
    with pytest.raises(ValueError, match="requests: expected a positive integer"):
        draw_sessions(LOADS["agent"], 0)

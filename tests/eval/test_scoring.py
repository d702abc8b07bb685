"""Scores of replies, perplexity and statistics, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.eval.prompt import Answer, Prompt, make_text
from sparsek_backend.eval.scoring import Reply, score_reply
from sparsek_backend.eval.stats import divergence, mcnemar, mean_interval, pack

PROMPT = Prompt(
    task="records",
    variant="plain",
    length=2,
    index=0,
    pieces=((1, 2),),
    answers=(Answer("12", ((7, 1, 2), (1, 2))), Answer("34", ((7, 3, 4), (3, 4)))),
    target=(7, 1, 2, 9, 7, 3, 4),
    max_tokens=12,
)
LIKELY = [{token: -0.5} for token in PROMPT.target[:6]] + [{4: -4.0, 5: -0.1}]


@pytest.mark.parametrize(
    ("tokens", "text", "accuracy"),
    [
        ((7, 1, 2, 9, 7, 3, 4), None, 1.0),
        ((3, 4, 9, 1, 2), None, 1.0),  # in any order
        ((1, 9, 2, 3, 4), None, 0.5),  # a gap is a miss
        ((1, 3, 2, 4), None, 0.0),
        ((), None, 0.0),
        ((1, 2, 3, 4), "12 and 43", 0.5),  # text counts where there is text
        (None, "the values are 34, 12.", 1.0),
    ],
)
def test_a_reply_is_scored_by_what_it_contains(
    tokens: tuple[int, ...] | None, text: str | None, accuracy: float
) -> None:
    score = score_reply(PROMPT, Reply(tokens, text, LIKELY))
    assert score == {
        "accuracy": accuracy,
        "correct": accuracy == 1.0,
        "nll": pytest.approx(1.0),
        "likely": pack(LIKELY),
    }


@pytest.mark.parametrize(
    ("metric", "tokens", "text", "accuracy"),
    [
        ("string_match_all", None, "they are AB, then cd", 1.0),  # in any case
        ("string_match_all", None, "only cd", 0.5),
        ("string_match_part", None, "only cd", 1.0),
        ("string_match_part", None, "neither", 0.0),
        ("string_match_all", (3, 4), None, 0.5),
        ("string_match_part", (3, 4), None, 1.0),
        ("string_match_part", (4, 3), None, 0.0),
    ],
)
def test_rulers_metrics_score_a_reply(
    metric: str, tokens: tuple[int, ...] | None, text: str | None, accuracy: float
) -> None:
    answers = (Answer("ab", ((1, 2),)), Answer("CD", ((3, 4),)))
    prompt = replace(PROMPT, answers=answers, metric=metric)
    score = score_reply(prompt, Reply(tokens, text, LIKELY))
    assert score == {
        "accuracy": accuracy,
        "correct": accuracy == 1.0,
        "nll": pytest.approx(1.0),
        "likely": pack(LIKELY),
    }


def test_a_reply_without_its_logprobs_or_words_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 7, one for each token"):
        score_reply(PROMPT, Reply((1,), None, LIKELY[1:]))
    with pytest.raises(ValueError, match="expected text or tokens"):
        score_reply(PROMPT, Reply(None, None, LIKELY))


def test_a_text_is_read_in_its_second_half() -> None:
    text = make_text(3, tuple(range(10, 19)))
    assert (text.ids, text.target) == ([10, 11, 12, 13], (14, 15, 16, 17, 18))
    assert text.name == "text/text/9/3"
    assert text.fits
    likely = [{token: -3.0 if token < 16 else -1.0, 5: -2.0} for token in text.target]
    score = score_reply(text, Reply((), None, likely))
    assert (score["accuracy"], score["correct"]) == (0.6, False)
    assert score["nll"] == pytest.approx((2 * 3.0 + 3 * 1.0) / 5)


@pytest.mark.parametrize(
    ("both", "lost", "gained", "neither", "p"),
    [
        (5, 0, 0, 5, 1.0),
        (3, 1, 0, 2, 1.0),
        (0, 5, 0, 0, 2 * (1 / 32)),
        (7, 8, 1, 4, 2 * (1 + 9) / 2**9),
        (1, 2, 10, 1, 2 * (1 + 12 + 66) / 2**12),
        (9, 4, 4, 9, 1.0),
    ],
)
def test_mcnemars_exact_test(both: int, lost: int, gained: int, neither: int, p: float) -> None:
    reference = [True] * both + [True] * lost + [False] * gained + [False] * neither
    other = [True] * both + [False] * lost + [True] * gained + [False] * neither
    assert mcnemar(reference, other) == (lost, gained, pytest.approx(p))


def test_mcnemar_needs_pairs() -> None:
    with pytest.raises(ValueError, match="longer"):
        mcnemar([True], [True, False])


def test_bootstrap_intervals() -> None:
    assert mean_interval([[1.0, 1.0], [0.0, 0.0]]) == (0.5, 0.5, 0.5)
    mean, low, high = mixed = mean_interval([[0.0, 1.0] * 200])
    assert mean == 0.5
    # the normal approximation: 1.96 * 0.5 / sqrt(400) = 0.049
    assert low == pytest.approx(0.451, abs=0.01)
    assert high == pytest.approx(0.549, abs=0.01)
    assert mean_interval([[0.0, 1.0] * 200]) == mixed
    # tasks weigh the same, however many prompts each has
    assert mean_interval([[1.0] * 300, [0.0, 1.0]]) == (0.75, 0.5, 1.0)
    with pytest.raises(ValueError, match="at least one score"):
        mean_interval([[1.0], []])


def test_a_task_with_one_score_is_as_it_is_in_every_draw() -> None:
    assert mean_interval([[0.0, 1.0], [1.0]]) == (0.75, 0.5, 1.0)


def places(*rows: dict[int, float]) -> str:
    """Packed from probabilities."""
    return pack([{token: math.log(share) for token, share in row.items()} for row in rows])


def test_divergence_by_hand() -> None:
    """Tokens that both list count by themselves, all others together."""
    old = places({1: 0.5, 2: 0.25}, {1: 0.5, 3: 0.5}, {7: 0.9})
    new = places({1: 0.25, 2: 0.5}, {1: 0.25, 4: 0.5}, {8: 0.9})
    known = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    same_rest = 0.25 * math.log(0.25 / 0.25)
    other_rest = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    found = divergence(old, new)
    assert found.tolist() == pytest.approx([known + same_rest, other_rest, 0.0], abs=1e-6)
    assert divergence(old, old).tolist() == [0.0] * 3


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 30), spread=st.floats(0.1, 6.0))
def test_divergence_is_a_lower_bound(seed: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    logits = spread * random.standard_normal((2, 5, 200))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    old, new = (pack([dict(enumerate(row)) for row in rows]) for rows in logprobs)
    whole = (np.exp(logprobs[0]) * (logprobs[0] - logprobs[1])).sum(-1)
    found = divergence(old, new)
    assert (found >= -1e-6).all()
    assert (found <= whole + 1e-4).all()


@pytest.mark.parametrize(("count", "kept"), [(512, 512), (513, 257), (2048, 512), (5000, 500)])
def test_long_answers_keep_some_places(count: int, kept: int) -> None:
    every = [{1: math.log(0.1 + 0.8 * place / count)} for place in range(count)]
    found = divergence(pack(every), pack([{1: math.log(0.25)}] * count))
    assert len(found) == kept
    assert found[-1] > found[len(found) // 2]
    assert pack([]) == ""

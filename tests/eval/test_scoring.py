"""Scores of replies, perplexity and statistics, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsek_backend.eval.perplexity import pick_texts, read_texts, score_text
from sparsek_backend.eval.prompt import Answer, Prompt
from sparsek_backend.eval.scoring import Reply, Score, score_reply
from sparsek_backend.eval.stats import mcnemar, mean_interval
from tests.eval.readers import WordTokenizer

TEXTS = [(f"text-{i}", "lorem ipsum dolor sit amet. " * 40 * (i + 1)) for i in range(6)]
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
LOGPROBS = [-0.5] * 6 + [-4.0]


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
    score = score_reply(PROMPT, Reply(tokens, text, LOGPROBS))
    assert score == Score(accuracy, accuracy == 1.0, pytest.approx(1.0))


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
    score = score_reply(prompt, Reply(tokens, text, LOGPROBS))
    assert score == Score(accuracy, accuracy == 1.0, pytest.approx(1.0))


def test_a_reply_without_its_logprobs_or_words_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 7, one for each token"):
        score_reply(PROMPT, Reply((1,), None, LOGPROBS[1:]))
    with pytest.raises(ValueError, match="expected text or tokens"):
        score_reply(PROMPT, Reply(None, None, LOGPROBS))


def test_perplexity_reports_the_second_half_apart() -> None:
    logprobs = [-1.0 if i < 500 else -3.0 for i in range(1, 1000)]
    found = score_text(logprobs)
    assert found["nll_second_half"] == pytest.approx(3.0)
    assert found["nll"] == pytest.approx((499 * 1.0 + 500 * 3.0) / 999)


def test_texts_are_spread_and_too_short_ones_refused(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    picked = pick_texts(TEXTS, tokenizer, length=300, count=3)
    assert [len(tokens) for _, tokens in picked] == [300] * 3
    with pytest.raises(ValueError, match=r"2 texts of at least 100000 tokens, found 0 among 6"):
        pick_texts(TEXTS, tokenizer, length=100_000, count=2)
    with pytest.raises(ValueError, match=r"found 1 \(the longest has 1441\)"):
        pick_texts(TEXTS, tokenizer, length=1400, count=2)
    with pytest.raises(ValueError, match=r"folder with \.txt files"):
        read_texts(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert read_texts(tmp_path) == [("a", "one"), ("b", "two")]


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
    with pytest.raises(ValueError, match="other: expected 1 prompts"):
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

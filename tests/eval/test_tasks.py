"""Tasks, results and plots over a model that is pure arithmetic."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparsek_backend.eval.plot import plot_results
from sparsek_backend.eval.results import BudgetResult, summary_rows, summary_table, write_results
from sparsek_backend.eval.tasks import pick_texts, read_texts, run_passkey, run_perplexity

TEXTS = [(f"text-{i}", "lorem ipsum dolor sit amet. " * 40 * (i + 1)) for i in range(6)]


class Reader:
    """A byte-level model that finds the last pass key among the latest `reach` tokens."""

    def __init__(self, reach: int = 10**9) -> None:
        self.reach = reach
        self.prompts: list[list[int]] = []

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [-1.0 if i < len(tokens) // 2 else -3.0 for i in range(1, len(tokens))]

    def generate(self, tokens: Sequence[int], max_tokens: int) -> str:
        self.prompts.append(list(tokens))
        found = re.findall(r"The pass key is (\d+)", bytes(tokens[-self.reach :]).decode())
        return f" {found[-1]}. Remember" if found else " not known"


def test_perplexity_reports_the_second_half_apart() -> None:
    picked = pick_texts(TEXTS, Reader(), length=1000, count=2)
    assert [len(tokens) for _, tokens in picked] == [1000, 1000]
    first, _ = run_perplexity(Reader(), picked, lambda _: None)
    assert first.nll_second_half == pytest.approx(3.0)
    assert first.nll == pytest.approx((499 * 1.0 + 500 * 3.0) / 999)


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 texts of at least 100000 tokens, found 0 among 6"):
        pick_texts(TEXTS, Reader(), length=100_000, count=2)
    with pytest.raises(ValueError, match=r"found 1 \(the longest has 6720\)"):
        pick_texts(TEXTS, Reader(), length=6500, count=2)


def test_texts_come_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder with \.txt files"):
        read_texts(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert read_texts(tmp_path) == [("a", "one"), ("b", "two")]


def test_passkeys_are_found_where_the_model_looks() -> None:
    lengths, depths = (600, 1200), (0.0, 0.5, 1.0)
    everywhere, near = Reader(), Reader(reach=300)
    found = run_passkey(
        everywhere, TEXTS, lengths=lengths, depths=depths, seed=0, progress=lambda _: None
    )
    assert [len(prompt) for prompt in everywhere.prompts] == [600] * 3 + [1200] * 3
    assert all(score.correct for score in found)
    lost = run_passkey(near, TEXTS, lengths=lengths, depths=depths, seed=0, progress=lambda _: None)
    assert [score.correct for score in lost] == [False, False, True] * 2
    again = run_passkey(
        Reader(), TEXTS, lengths=lengths, depths=depths, seed=0, progress=lambda _: None
    )
    assert again == found


@pytest.mark.parametrize(("length", "depth"), [(100, 0.5), (600, 1.5)])
def test_impossible_passkeys_are_refused(length: int, depth: float) -> None:
    with pytest.raises(ValueError, match=r"length|depth"):
        run_passkey(
            Reader(), TEXTS, lengths=(length,), depths=(depth,), seed=0, progress=lambda _: None
        )


def results() -> list[BudgetResult]:
    texts = [(name, Reader().tokenize(text)[:900]) for name, text in TEXTS[:2]]
    scores = run_perplexity(Reader(), texts, lambda _: None)
    probes = run_passkey(
        Reader(), TEXTS, lengths=(600,), depths=(0.5,), seed=0, progress=lambda _: None
    )
    worse = [
        dataclasses.replace(score, nll=score.nll + 0.1, nll_second_half=score.nll_second_half + 0.2)
        for score in scores
    ]
    return [
        BudgetResult("dense", None, 1.0, scores, probes, 1.0),
        BudgetResult("window", {"num_sink": 0}, 0.25, worse, probes, 1.0),
    ]


def test_the_summary_is_against_the_first_result(tmp_path: Path) -> None:
    dense, window = summary_rows(results())
    assert dense["delta_nll"] == 0.0
    assert window["delta_nll"] == pytest.approx(0.1)
    assert window["delta_nll_second_half"] == pytest.approx(0.2)
    assert window["ppl_second_half"] == pytest.approx(math.exp(3.2))
    table, full = write_results(tmp_path, "q", results(), {"model": "m"})
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["budget"] for row in rows] == ["dense", "window"]
    assert float(rows[1]["delta_nll_second_half"]) == pytest.approx(0.2, rel=1e-5)
    document = json.loads(full.read_text())
    assert BudgetResult.from_json(document["results"][1]) == results()[1]
    assert summary_table(results()).row_count == 2


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    path = plot_results(results(), tmp_path / "q.png", "title")
    assert path.read_bytes().startswith(b"\x89PNG")

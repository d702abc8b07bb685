"""RULER by its authors' package: prompts of every task, the chat frame, the command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsek_backend.eval.cli import app
from sparsek_backend.eval.prompt import Prompt
from sparsek_backend.eval.prompt_file import load_prompts
from sparsek_backend.eval.ruler import make_ruler_prompts, read_tasks
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.eval.workers import WorkerError
from sparsek_backend.models import fetch_model
from tests.eval.endpoint import Endpoint, serving, text_of
from tests.processes import SECONDS

LENGTH = 4096


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Endpoint, "width", 4)
    with serving() as address:
        yield address


def make(
    url: str, tasks: Sequence[str], count: int, length: int = LENGTH, seed: int = 0
) -> tuple[list[Prompt], list[str]]:
    said: list[str] = []
    made = make_ruler_prompts(
        ServedScorer(url),
        url,
        tasks=tasks,
        lengths=[length],
        count=count,
        seed=seed,
        on_progress=said.append,
    )
    return made, said


def test_every_task_makes_prompts_that_fit(url: str) -> None:
    tasks = read_tasks()
    assert len(tasks) == 13
    made, said = make(url, list(tasks), count=2)
    assert [(p.task, p.index) for p in made] == [(task, i) for task in tasks for i in (0, 1)]
    assert "13 of 13" in said[-1]
    assert len({prompt.digest for prompt in made}) == len(made)
    for prompt in made:
        task = tasks[prompt.task]
        assert prompt.max_tokens == task["tokens_to_generate"]
        assert LENGTH // 2 < len(prompt.ids) <= LENGTH - prompt.max_tokens
        begin, *text = prompt.ids
        assert begin == 1
        words, answers = text_of(text), [answer.text for answer in prompt.answers]
        prefix = task["answer_prefix"].partition("{")[0]
        assert words.rpartition("\n")[2].count(prefix) == 1
        assert text_of(prompt.target).strip().startswith(("1. " + answers[0], answers[0]))
        if prompt.task.startswith("qa"):
            assert prompt.metric == "string_match_part"
        else:
            assert prompt.metric == "string_match_all"
            assert all(answer in words for answer in answers)
            assert all(answer in text_of(prompt.target) for answer in answers)


def test_prompts_depend_on_seed_and_index_alone(url: str) -> None:
    (first,), _ = make(url, ["vt"], count=1)
    (again, second), _ = make(url, ["vt"], count=2)
    (other,), _ = make(url, ["vt"], count=1, seed=1)
    assert first == again
    assert len({first.digest, second.digest, other.digest}) == 3


def test_a_length_that_a_task_does_not_fit_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"length: expected at least \d+ tokens for task 'cwe'"):
        make(url, ["cwe"], count=1, length=300)
    monkeypatch.setattr("sparsek_backend.eval.ruler._SILENCE", 8.0)
    with pytest.raises(WorkerError, match="length 600: RULER's vt: the worker said nothing"):
        make(url, ["vt"], count=1, length=600)  # its example fits, its smallest text does not


def test_a_chat_has_one_turn_and_the_answer_begins_behind_it(tmp_path: Path) -> None:
    model, out = str(fetch_model()), tmp_path / "prompts.json.gz"
    arguments = ["prompts", model, "--suite", "ruler", "--task", "vt", "--task", "cwe"]
    arguments += ["--length", "1500", "--samples", "1", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = load_prompts(out)
    tokenizer, tasks = HubTokenizer(model), read_tasks()
    before, after = tokenizer.frame()
    assert [prompt.task for prompt in found.prompts] == ["vt", "cwe"]
    for prompt in found.prompts:
        assert prompt.pieces[0] == before
        assert prompt.pieces[2] == after
        _, words, _, lead = (tokenizer.decode(piece) for piece in prompt.pieces)
        prefix = tasks[prompt.task]["answer_prefix"].partition("{")[0]
        assert lead.startswith(prefix)
        assert words.count(prefix) == 1  # of the example
        assert words.endswith(("in the text above.", "in the above list?"))
        assert "\u2063" not in words + lead


def test_the_command_asks_servers(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "answer", r"(?s).*VAR ([A-Z]{5}) = \d+")
    arguments = ["--suite", "ruler", "--task", "vt", "--length", "2048", "--samples", "2"]
    arguments += ["--base-url", f"a={url}", "--base-url", f"b={url}", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "quality.json").read_text())
    for row in document["retrieval"]:
        assert (row["task"], row["variant"], row["length"]) == ("vt", "plain", 2048)
        assert row["prompts"] == 2
        assert row["accuracy"] == pytest.approx(0.2)  # the first of five names
        assert row["correct"] == 0.0


@pytest.mark.engine
def test_the_command_asks_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsek_backend.eval.workers.SILENCE_LIMIT", SECONDS)
    arguments = ["--suite", "ruler", "--model", str(fetch_model()), "--task", "niah_single_1"]
    arguments += ["--length", "1024", "--samples", "2", "--budget", "window:128"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "quality.json").read_text())
    assert "forward calls" in document["runs"][1]["backend"]
    dense, window = document["retrieval"]
    assert dense["prompts"] == window["prompts"] == 2
    assert dense["accuracy"] == 1.0
    assert window["accuracy"] == 0.0
    assert window["delta_nll"] > 0.5

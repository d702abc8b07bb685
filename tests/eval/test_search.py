"""The cheapest settings that hold, and how few are measured to find them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsek_backend.eval import tune
from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.job import score
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.record import append_rows, run_key
from sparsek_backend.eval.runs import Workplace
from sparsek_backend.eval.search import cheapest, cost_of, worst_loss
from sparsek_backend.eval.tasks import make_prompts
from tests.eval.readers import Reader, WordTokenizer

SIZES = (4, 8, 16, 32, 64)


def family(last: int) -> list[Budget]:
    return [parse_budget(f"block_topk:{k},dense_last={last}") for k in SIZES]


def cost(budget: Budget) -> float:
    return cost_of(budget, [8192])


@pytest.mark.parametrize(
    ("least", "found"),
    [
        ((16, 32), "block_topk:16,dense_last=64"),
        ((16, 8), "block_topk:8,dense_last=0"),
        ((16, 16), "block_topk:16,dense_last=0"),
        ((100, 64), "block_topk:64,dense_last=0"),
        ((4, 4), "block_topk:4,dense_last=0"),
        ((100, 100), None),
    ],
)
def test_the_cheapest_that_holds(least: tuple[int, int], found: str | None) -> None:
    asked: list[str] = []

    def holds(budget: Budget) -> bool:
        asked.append(budget.label)
        return budget.config.top_k >= least[budget.config.dense_last == 0]

    best = cheapest([family(64), family(0)], cost, holds)
    assert (None if best is None else best.label) == found
    assert len(asked) == len(set(asked)) <= 6


def test_costs_rise_with_what_is_attended() -> None:
    few, more = parse_budget("block_topk:8"), parse_budget("block_topk:16")
    assert cost(few) < cost(more) < 1.0
    assert cost(parse_budget("block_topk:8,dense_last=0")) < cost(few)


def test_the_worst_cell_counts() -> None:
    rows = [
        {"label": "dense", "task": "mean", "length": 1},
        *(
            {"label": "b", "task": task, "length": 1, "delta_nll": nll, "delta_nll_low": nll - 1,
             "delta_nll_high": nll + 1}
            for task, nll in (("mean", 0.25), ("mean", 0.5), ("single", 9.0))
        ),
    ]  # fmt: skip
    found = worst_loss(rows, "b")
    assert (found.mean, found.low, found.high) == (0.5, -0.5, 1.5)
    with pytest.raises(ValueError, match="expected scores of 'c'"):
        worst_loss(rows, "c")


class Arithmetic:
    """A model that loses the answers unless it selects at least 8 blocks."""

    def __init__(self, *arguments: object) -> None:
        pass

    def run(self, budget: Budget, place: Workplace, on_progress: object) -> str:
        loses = not budget.is_dense and budget.config.top_k < 8
        key = run_key({"label": budget.label})
        about = {"label": budget.label, "settings": budget.settings, "known": True}
        append_rows(place.record, [{"kind": "run", "run": key, **about, "machine": {}}])
        score(
            Reader(WordTokenizer(), reach=10 if loses else 1 << 20),
            place.prompts,
            record=place.record,
            run=key,
            batch=8,
            on_progress=lambda count, what: None,
        )
        return key


def test_the_command_prints_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = WordTokenizer()
    made = make_prompts(
        tokenizer, tasks=["single"], variants=["plain"], lengths=[6000], count=8, seed=0
    )
    file = tmp_path / "prompts.json"
    save_prompts(file, PromptSet(list(made)))

    monkeypatch.setattr(tune, "LocalModel", Arithmetic)
    command = ["model", "--prompts", str(file), "--equal", "--out", str(tmp_path), "--size", "4"]
    done = CliRunner().invoke(tune.app, [*command, "--size", "8", "--size", "16"])
    assert done.exit_code == 0, done.output
    assert "cheapest that hold 0.01: block_topk:8,dense_last=0" in done.output
    assert '{"sparsek": {"top_k": 8, "dense_last": 0}}' in done.output
    done = CliRunner().invoke(tune.app, command)
    assert done.exit_code == 1
    assert "nothing holds a loss of 0.01" in done.output
    single = tmp_path / "single.json"
    save_prompts(single, PromptSet(load_prompts(file).prompts[:1]))
    done = CliRunner().invoke(tune.app, ["model", "--prompts", str(single)])
    assert done.exit_code == 2
    assert "at least 2 prompts" in " ".join(done.output.split())
    for ignored in (["--task", "single"], ["--texts", "4"]):
        done = CliRunner().invoke(tune.app, [*command, *ignored])
        assert done.exit_code == 2
        assert ignored[0] in done.output


def test_prompts_of_an_earlier_search_do_not_count(tmp_path: Path) -> None:
    sets = [
        PromptSet(
            list(
                make_prompts(
                    WordTokenizer(),
                    tasks=["single"],
                    variants=["plain"],
                    lengths=[length],
                    count=4,
                    seed=0,
                )
            )
        )
        for length in (6000, 3000)
    ]
    budget, record = parse_budget("block_topk:8"), tmp_path / "tune.jsonl"
    Arithmetic().run(parse_budget("dense"), Workplace(sets[0], tmp_path, record), None)
    lost = replace(budget, settings=parse_budget("block_topk:4").settings)
    Arithmetic().run(lost, Workplace(sets[0], tmp_path, record), None)
    local: Any = Arithmetic()
    assert tune.Trials(local, Workplace(sets[1], tmp_path, record), 0.01).holds(budget)

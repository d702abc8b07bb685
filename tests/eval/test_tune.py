"""The cheapest two numbers that hold a loss, and how few pairs are measured to find them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sparsek_backend.eval import tune
from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.record import append_rows, run_key
from sparsek_backend.eval.results import worst_row
from sparsek_backend.eval.runs import Workplace
from sparsek_backend.eval.tasks import make_prompts
from sparsek_backend.eval.tune import cheapest, cost_of
from tests.eval.readers import Reader, WordTokenizer

SIZES = (4, 8, 16, 32, 64)


def cost(budget: Budget) -> float:
    return cost_of(budget, [8192])


def numbers(budget: Budget) -> tuple[int, int]:
    return budget.config.top_k, budget.config.decode_tokens // 64


@settings(deadline=None, max_examples=60)
@given(least=st.lists(st.sampled_from((*SIZES, 100)), min_size=len(SIZES), max_size=len(SIZES)))
def test_the_cheapest_pair_that_holds(least: list[int]) -> None:
    """A pair holds with enough blocks for decoded tokens: fewer, the more a prompt's query has."""
    needed = dict(zip(SIZES, sorted(least, reverse=True), strict=True))
    asked: list[tuple[int, int]] = []

    def holds(budget: Budget) -> bool:
        asked.append(numbers(budget))
        return asked[-1][1] >= needed[asked[-1][0]]

    best = cheapest(SIZES[::-1], cost, holds)
    every = [
        parse_budget(f"block_topk:{p},decode_tokens={64 * d}")
        for p, d in itertools.product(SIZES, SIZES)
        if d >= needed[p]
    ]
    assert (best is None) == (not every)
    assert best is None or cost(best) == min(map(cost, every))
    assert len(asked) == len(set(asked)) < 2 * len(SIZES)


def test_costs_rise_with_what_is_attended() -> None:
    few, more = parse_budget("block_topk:8"), parse_budget("block_topk:16")
    assert cost(few) < cost(more) < 1.0
    assert cost(parse_budget("block_topk:8,decode_tokens=512")) < cost(few)


class Arithmetic:
    """A model that loses the answers unless prompts select 8 blocks and decoded tokens 16."""

    def __init__(self, *arguments: object) -> None:
        pass

    def run(self, budget: Budget, place: Workplace, on_progress: object) -> str:
        sparse = budget.settings is not None
        loses = sparse and any(x < y for x, y in zip(numbers(budget), (8, 16), strict=True))
        key = run_key({"label": budget.label})
        about = {"label": budget.label, "settings": budget.settings, "known": True}
        append_rows(place.record, [{"kind": "run", "run": key, **about, "machine": {}}])
        reader = Reader(reach=10 if loses else 1 << 20)
        place.score(reader.reply, key, 8, lambda count, what: None)
        return key


def prompts_of(length: int, count: int) -> PromptSet:
    made = make_prompts(
        WordTokenizer(),
        tasks=["records"],
        variants=["plain"],
        lengths=[length],
        count=count,
        seed=0,
    )
    return PromptSet(list(made))


def test_the_command_prints_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.json"
    save_prompts(file, prompts_of(6000, 8))
    monkeypatch.setattr(tune, "LocalModel", Arithmetic)
    command = ["model", "--prompts", str(file), "--out", str(tmp_path), "--size", "4"]
    done = CliRunner().invoke(tune.app, [*command, "--size", "8", "--size", "16"])
    assert done.exit_code == 0, done.output
    assert "cheapest that hold 0.01: block_topk:8,decode_tokens=1024" in done.output
    assert '{"sparsek": {"top_k": 8, "decode_tokens": 1024}}' in done.output
    table = [line.split() for line in done.stdout.splitlines() if line.endswith((" no ", " yes "))]
    assert [(cells[0], cells[1], cells[-1]) for cells in table] == [
        ("16", "256", "no"),
        ("16", "512", "no"),
        ("16", "1024", "yes"),
        ("8", "1024", "yes"),
        ("4", "1024", "no"),
    ]
    done = CliRunner().invoke(tune.app, command)
    assert done.exit_code == 2
    assert "nothing holds a loss of 0.01" in done.output
    single = tmp_path / "single.json"
    save_prompts(single, PromptSet(load_prompts(file).prompts[:1]))
    done = CliRunner().invoke(tune.app, ["model", "--prompts", str(single)])
    assert done.exit_code == 2
    assert "at least 2 prompts" in " ".join(done.output.split())
    refused = (["--task", "records"], ["--seed", "4"], ["--loss", "nan"], ["--kv-cache-gib", "-1"])
    for option in refused:
        done = CliRunner().invoke(tune.app, [*command, *option])
        assert done.exit_code == 2
        assert option[0].removeprefix("--") in done.output


def test_the_length_that_loses_most_counts(tmp_path: Path) -> None:
    asked = PromptSet([*prompts_of(6000, 4).prompts, *prompts_of(3000, 4).prompts])
    record = tmp_path / "tune.jsonl"
    keys = []
    for label, reach in (("dense", 1 << 20), ("window:500", 2000)):
        keys.append(run_key({"label": label}))
        about = {"label": label, "settings": parse_budget(label).settings, "known": True}
        append_rows(record, [{"kind": "run", "run": keys[-1], **about}])
        reader = Reader(reach)
        Workplace(asked, record, record).score(reader.reply, keys[-1], 8, lambda count, what: None)
    worst = worst_row(record, asked.prompts, *keys)
    assert (worst["length"], worst["label"]) == (6000, "window:500")
    few = worst_row(record, prompts_of(3000, 4).prompts, *keys)  # the rest is an earlier search's
    assert few["length"] == 3000
    assert few["delta_nll"] < worst["delta_nll"]

"""The quality bars, measured: real model, real texts, through vLLM."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.options import BudgetOptions, PromptOptions
from sparsek_backend.eval.prompt_file import save_prompts
from sparsek_backend.eval.record import read_rows
from sparsek_backend.eval.results import collect_runs, compare_runs
from sparsek_backend.eval.runs import LocalModel, Workplace
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.models import fetch_model
from tests.eval.one_text import questions_of_one_text
from tests.processes import SECONDS

TEXT_LENGTH = 4096
LIMITS = {"block_topk:16": (-0.02, 0.02), "sink_window": (-0.02, 0.10), "window": (0.3, 5.0)}
"""Added NLL over the second half of a text: least and most."""

QUESTIONS, LENGTH = 12, 62 * 128 + 25
"""Prompts begin to differ in their last page, so the rest is shared.  They begin with the text: an
engine has filled its pages before it is asked.
"""
ANSWERS = {"block_topk:16": (-0.10, 0.05), "sink_window": (0.5, 20.0)}
"""Added NLL of right answers: what its 95 % interval is above and below."""
DENSE_NLL = 0.6
"""What the NLL of dense attention is below: the model can answer."""


@pytest.mark.engine
def test_added_nll_stays_within_its_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsek_backend.eval.workers.SILENCE_LIMIT", SECONDS)
    model = str(fetch_model())
    tokenizer = HubTokenizer(model)
    options = PromptOptions(task=["text"], samples=1, length=[TEXT_LENGTH])
    made = options.make(tokenizer, model)
    (text,) = made.prompts
    begun = (*text.ids, *text.target)
    questions = [
        replace(prompt, max_tokens=1)  # what it says of itself has no bar
        for prompt in questions_of_one_text(tokenizer, begun, length=LENGTH, count=QUESTIONS)
    ]
    budgets = BudgetOptions(list(LIMITS)).parsed()
    local = LocalModel(model)

    def run(budget: Budget) -> str:
        """Score what has a bar: one engine for each budget, and one for dense attention."""
        asked = budget.settings is None or budget.label in ANSWERS
        prompts = replace(made, prompts=[text, *(questions if asked else ())])
        prompts_file = tmp_path / f"{budget.label}.json"
        save_prompts(prompts_file, prompts)
        # a record of its own: two processes do not append to one file
        record = tmp_path / f"{budget.label}.jsonl"
        return local.run(budget, Workplace(prompts, prompts_file, record), lambda count, what: None)

    with ThreadPoolExecutor(max_workers=2) as pool:  # two engines at a time: half the start-up
        keys = list(pool.map(run, budgets))
    rows = [row for one in budgets for row in read_rows(tmp_path / f"{one.label}.jsonl")]
    runs = collect_runs(rows, keys)
    for found in runs[1:]:
        assert "forward calls" in found.about["backend"]
    rows = compare_runs(runs)
    read = [row for row in rows if row["task"] == "text"]
    added = {row["label"]: row["delta_nll"] for row in read[1:]}
    for label, (least, most) in LIMITS.items():
        assert least <= added[label] <= most, f"{label}: {added[label]:+.4f}"
    dense, *sparse = (row for row in rows if row["task"] == "one_text")
    assert dense["nll"] < DENSE_NLL
    answers = {row["label"]: row for row in sparse}
    assert answers.keys() == ANSWERS.keys()
    for label, (least, most) in ANSWERS.items():
        row = answers[label]
        assert row["prompts"] == QUESTIONS
        assert least <= row["delta_nll_low"] <= row["delta_nll_high"] <= most, row

"""The quality bars, measured: real model, real texts, through vLLM."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sparsek_backend.eval.budgets import Budget, parse_budgets
from sparsek_backend.eval.options import PromptOptions
from sparsek_backend.eval.prompt_file import save_prompts
from sparsek_backend.eval.record import read_rows
from sparsek_backend.eval.results import collect_runs, perplexity_rows, retrieval_rows
from sparsek_backend.eval.runs import LocalModel, Workplace
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.models import fetch_model
from tests.eval.one_text import questions_of_one_text

LIMITS = {"block_topk:16": (-0.02, 0.02), "sink_window": (-0.02, 0.10), "window": (0.3, 5.0)}
"""Added NLL over the second half of 4096 tokens: least and most."""


ANSWERS = {"block_topk:16": (-0.10, 0.05), "sink_window": (0.5, 20.0)}
"""Added NLL of right answers: what its 95 % interval is above and below."""
LENGTH, QUESTIONS = 4096, 12


@pytest.mark.engine
def test_added_nll_stays_within_its_bars(tmp_path: Path) -> None:
    model = str(fetch_model())
    tokenizer = HubTokenizer(model)
    options = PromptOptions(
        tasks=("single",),
        variants=("plain",),
        lengths=(LENGTH,),
        prompts_per_task=0,
        texts=1,
        text_length=4096,
        texts_folder=None,
        seed=0,
    )
    asked = questions_of_one_text(tokenizer, length=LENGTH, count=QUESTIONS)
    texts = options.make(tokenizer, {})
    prompts = replace(texts, prompts=asked)
    save_prompts(tmp_path / "texts.json", texts)
    save_prompts(tmp_path / "prompts.json", prompts)
    budgets = parse_budgets(list(LIMITS))
    local = LocalModel(model)

    def run(budget: Budget) -> str:
        # a record of its own: two processes do not append to one file
        record = tmp_path / f"{budget.label}.jsonl"
        place = Workplace(prompts, tmp_path / "prompts.json", record)
        if budget.label == "window":  # sinks and window fail the questions already
            place = Workplace(texts, tmp_path / "texts.json", record)
        return local.run(budget, place, lambda count, what: None)

    with ThreadPoolExecutor(max_workers=2) as pool:  # two engines at a time: half the start-up
        keys = list(pool.map(run, budgets))
    rows = [row for one in budgets for row in read_rows(tmp_path / f"{one.label}.jsonl")]
    runs = collect_runs(rows, keys)
    for run_found, row in zip(runs[1:], perplexity_rows(runs)[1:], strict=True):
        least, most = LIMITS[row["label"]]
        added = row["delta_nll_second_half"]
        assert least <= added <= most, f"{row['label']}: {added:+.4f}, {run_found.about}"
        assert "forward calls" in run_found.about["backend"]
    dense, *sparse = (row for row in retrieval_rows(runs))
    assert dense["nll"] < 0.6
    answers = {row["label"]: row for row in sparse}
    for label, (least, most) in ANSWERS.items():
        row = answers[label]
        assert row["prompts"] == QUESTIONS
        assert least <= row["delta_nll_low"] <= row["delta_nll_high"] <= most, row

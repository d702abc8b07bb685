"""The quality bars, measured: real model, real texts, through vLLM's prompt_logprobs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sparsek_backend.eval.budgets import parse_budgets
from sparsek_backend.eval.cli import run_budget
from sparsek_backend.eval.job import Job
from sparsek_backend.models import fetch_model, fetch_texts

LIMITS = {"block_topk:16": (-0.02, 0.02), "sink_window": (-0.02, 0.10), "window": (0.3, 5.0)}
"""Added NLL over the second half of 4096 tokens: least and most."""


@pytest.mark.engine
def test_added_nll_stays_within_its_bars() -> None:
    job = Job(
        texts_folder=str(fetch_texts()),
        num_texts=1,
        length=4096,
        passkey_lengths=(),
        passkey_depths=(),
    )
    model = str(fetch_model())
    budgets = parse_budgets(list(LIMITS))
    with ThreadPoolExecutor(max_workers=2) as pool:  # two engines at a time: half the start-up
        dense, *sparse = pool.map(lambda budget: run_budget(model, budget, job), budgets)
    assert dense.nll_second_half is not None
    for result in sparse:
        assert result.nll_second_half is not None
        added = result.nll_second_half - dense.nll_second_half
        least, most = LIMITS[result.label]
        assert least <= added <= most, f"{result.label}: {added:+.4f}, {result.backend}"
        assert "forward calls" in result.backend

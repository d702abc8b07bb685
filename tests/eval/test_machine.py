"""What the evaluation takes from the machine that it runs on."""

from __future__ import annotations

import pytest
import torch

from sparsek_backend.eval.budgets import parse_budget
from sparsek_backend.eval.runs import LocalModel
from sparsek_backend.machine import cpu_dtype


@pytest.mark.parametrize(
    ("built", "fast", "dtype"),
    [(True, True, "auto"), (True, False, "float32"), (False, False, "auto")],
)
def test_models_run_in_float32_where_bf16_is_emulated(
    built: bool, fast: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: built)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_dtype() == dtype
    assert LocalModel("model").arguments()["dtype"] == dtype


def test_another_dtype_is_another_run() -> None:
    budget = parse_budget("dense")
    keys = {LocalModel("m", {"dtype": dtype}).key(budget, "c") for dtype in ("float32", "bfloat16")}
    assert len(keys) == 2

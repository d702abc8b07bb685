"""benchmarks/nsa_training_step.py: the toy run, the dense twin, and checks that fail."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.results import read_csv

CPU = torch.device("cpu")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script, beside which lie modules that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("nsa_training_step")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    command = ["nsa_training_step.py", "--toy", "--device", "cpu", "--vocab", "97", *arguments]
    monkeypatch.setattr(sys, "argv", [*command, "--budget-ms", "1"])
    script.main()


def test_the_toy_is_checked_and_timed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "step.csv"
    run(script, monkeypatch, "--tokens", "200", "--csv", str(file), "--commit", "abc")
    rows = read_csv(file)
    assert {row.commit for row in rows} == {"abc"}
    assert {(row.case, row.spec) for row in rows} == {("4x2", "q200")}
    timed = [row for row in rows if row.is_timed]
    assert all("bound 1e-2" in row.detail and (row.samples or 0) >= 5 for row in timed)
    attention = {row.provider: row.ms for row in timed if row.op == "nsa_training_attention"}
    step = {row.provider for row in timed if row.op == "nsa_training_step"}
    fastest = min(attention.keys() - {OURS}, key=lambda name: attention[name] or 0.0)
    assert step == {OURS, fastest}
    untimed = {row.provider: row.status for row in rows if not row.is_timed}
    assert untimed["cudnn"] == "error", "cuDNN runs on no CPU"


def test_nothing_dense_that_runs_ends_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(script.DENSE, "fa2")
    with pytest.raises(SystemExit, match="no dense attention with a backward pass"):
        run(script, monkeypatch, "--tokens", "200")


def test_the_twin_is_the_model_whose_window_sees_everything(script: ModuleType) -> None:
    model = script.sparse_model("32x8", 97, toy=True, device=CPU).float()
    twin = script.dense_twin(model, script.nsa_peers.fa2(torch.empty(0), torch.empty(0)))
    extra = dict(model.named_parameters()).keys() - dict(twin.named_parameters()).keys()
    assert {name.split(".")[-2] for name in extra} == {"gate_in", "gate_out"}
    ids = torch.randint(97, (1, 200))
    want = twin(ids)
    assert not torch.allclose(model(ids), want, atol=1e-2)
    for layer in model.model.layers:
        attention = layer.self_attn
        shut = torch.tensor([-1e3, -1e3, 1e3]).repeat_interleave(attention.num_heads)
        with torch.no_grad():
            attention.gate_out.weight.zero_()
            attention.gate_out.bias.copy_(shut)
    torch.testing.assert_close(model(ids), want)


@pytest.mark.parametrize("name", ["out", "dq", "dv"])
def test_wrong_attention_is_refused(script: ModuleType, name: str) -> None:
    right = script.nsa_peers.fa2(torch.empty(0), torch.empty(0))

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = right(q, k, v)
        changed = {"out": out, "dq": q, "dv": v.repeat_interleave(2, dim=2)}[name]
        return out + 0.5 * (changed if name == "out" else changed - changed.detach())

    tensors = {x: torch.randn(1, 70, heads, 16) for x, heads in (("q", 4), ("k", 2), ("v", 2))}
    assert "worst relative error" in script.check_dense("right", right, tensors)
    with pytest.raises(SystemExit, match=f"wrong: {name} is off by"):
        script.check_dense("wrong", wrong, tensors)

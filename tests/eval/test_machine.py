"""What the evaluation takes from the machine that it runs on."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparsek_backend import machine
from sparsek_backend.eval import runs
from sparsek_backend.eval.budgets import parse_budget
from sparsek_backend.eval.cli import run_all
from sparsek_backend.eval.prompt import Answer, Prompt, make_text
from sparsek_backend.eval.prompt_file import PromptSet, save_prompts
from sparsek_backend.eval.record import append_rows, read_rows
from sparsek_backend.eval.runs import LocalModel, Workplace
from sparsek_backend.machine import cpu_dtype
from tests.processes import SECONDS
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model


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


def test_the_commit_is_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for name in ("used.py", "installed.py"):
        (tmp_path / name).touch()
    for command in (("init", "-q"), ("add", "used.py"), ("commit", "-q", "-m", "theirs")):
        subprocess.run([*git, *command], check=True)
    found = {}
    for name in ("used.py", "installed.py"):
        monkeypatch.setattr(machine, "__file__", str(tmp_path / name))
        found[name] = machine.describe_machine(torch.device("cpu")).commit
    assert found["used.py"]
    assert not found["installed.py"]


def test_another_dtype_is_another_run() -> None:
    budget = parse_budget("dense")
    keys = {LocalModel("m", {"dtype": dtype}).key(budget, "c") for dtype in ("float32", "bfloat16")}
    assert len(keys) == 2


def test_runs_go_on_several_gpus_at_a_time() -> None:
    both = threading.Barrier(2, timeout=SECONDS)

    def scoring(on_progress: Any, gpu: str) -> str:
        on_progress(1, "scored")
        both.wait()  # of two runs: one alone would wait for ever
        return f"on {gpu}"

    found = run_all(PromptSet(), [(f"run {i}", scoring) for i in range(4)], ["0,1", "2,3"])
    assert sorted(found) == ["on 0,1"] * 2 + ["on 2,3"] * 2
    order = [(str(i), partial(lambda i, on_progress: str(i), i)) for i in range(5)]
    assert run_all(PromptSet(), order) == list("01234")


@pytest.mark.parametrize(
    ("gpus", "environment"), [("2", {"CUDA_VISIBLE_DEVICES": "2"}), (None, {})]
)
def test_a_worker_sees_its_gpus_alone(
    gpus: str | None, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(runs, "run_worker", lambda module, job, **options: given.append(options))
    place = Workplace(PromptSet([make_text(0, (1, 2))]), tmp_path / "p", tmp_path / "r.jsonl")
    LocalModel("m").run(parse_budget("dense"), place, lambda count, what: None, gpus)
    assert given[0]["environment"] == environment


def test_runs_that_append_at_a_time_leave_whole_lines(tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    row = {"likely": "x" * 300_000}  # longer than what is written at once
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: append_rows(record, [{**row, "of": i}]), range(60)))
    assert sorted(found["of"] for found in read_rows(record)) == list(range(60))


@pytest.mark.engine
def test_a_model_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of the heads, in a process of its own, whose counters are the proof."""
    monkeypatch.setattr("sparsek_backend.eval.workers.SILENCE_LIMIT", SECONDS)
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    model = make_tiny_model("llama", tmp_path)
    ids = torch.randint(3, VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    answer = Answer("none", ((1, 2),))
    kinds = {"task": "t", "variant": "plain", "length": 600, "index": 0, "max_tokens": 3}
    asked = Prompt(pieces=(tuple(ids.tolist()),), answers=(answer,), target=(7, 8), **kinds)
    prompts, file, record = PromptSet([asked]), tmp_path / "p.json", tmp_path / "r.jsonl"
    save_prompts(file, prompts)
    local = LocalModel(str(model), {"tensor_parallel_size": 2})
    budget = parse_budget("block_topk:2,decode_tokens=64,window_size=32,num_sink=16")
    local.run(budget, Workplace(prompts, file, record), lambda count, what: None)
    began, scored, ended = read_rows(record)
    assert "backend" not in began
    assert ended["backend"].startswith("SPARSEK, ")
    assert "of the context attended in decode" in ended["backend"]
    whole = torch.cat([ids, torch.tensor(asked.target)])[None]
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(model)(whole).logits[0].log_softmax(-1)
    wanted = -(dense[599, 7] + dense[600, 8]).item() / 2
    assert scored["nll"] == pytest.approx(wanted, abs=2.0)  # it attends a part of the context

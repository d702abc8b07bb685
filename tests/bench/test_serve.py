"""`sparsek bench serve`: plans, rows, files, and one real run of a tiny shape."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.bench import plan as plans
from sparsek_backend.bench import serve_worker
from sparsek_backend.bench.cli import app
from sparsek_backend.bench.serve import (
    ServeCase,
    ServePlan,
    parse_cases,
    run_serve,
    serve_table,
    write_results,
)
from sparsek_backend.bench.shapes import SHAPES, write_shape
from sparsek_backend.eval.record import append_rows
from sparsek_backend.machine import Machine, cpu_dtype
from tests.vllm_backend.engines import forget_engines, quickly

MACHINE = Machine("gpu", "1", "2", "3", "4", "abc")


def plan(**changes: Any) -> ServePlan:
    values: dict[str, Any] = {
        "model": "tiny",
        "cases": parse_cases([1024], [1, 4]),
        "settings": {"top_k": 4},
        "baseline": "FLASH_ATTN",
        "output_tokens": 8,
        "repeats": 2,
        "rounds": 2,
        "engine": {},
    }
    return ServePlan(**(values | changes))


def fake_worker(jobs: list[dict[str, Any]], fails_at: int | None = None) -> Any:
    """A worker that measures the cases that are left, up to one in the job of a number."""

    def run(module: str, job: dict[str, Any], **_: Any) -> dict[str, Any]:
        jobs.append(job)
        assert (Path(job["model"]) / "config.json").is_file()
        ours = job["settings"] is not None
        speed, share = (0.5, 0.2) if ours else (1.0, 1.0)
        for case in job["left"]:
            times = {"ttft_s": [speed, speed * 1.1], "tpot_s": [speed / 100] * case["requests"]}
            about = {"backend": job["backend"], "round": job["round"], "kv_cache_tokens": 9}
            line = {**about, **case, **times, "attended_share": share}
            append_rows(Path(job["path"]), [line])
            if len(jobs) == fails_at:
                raise RuntimeError("interrupted")
        return {}

    return run


def test_both_backends_run_in_turn_and_become_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    rows = run_serve(plan(), MACHINE, tmp_path / "serve.jsonl", lambda _: None)
    order = ["ours" if job["settings"] is not None else job["baseline"] for job in jobs]
    assert order == ["FLASH_ATTN", "ours", "ours", "FLASH_ATTN"]
    assert [job["seed"] for job in jobs] == [0, 0, 1, 1]
    assert all(job["engine"]["load_format"] == "dummy" for job in jobs)
    assert [(row["backend"], row["requests"]) for row in rows] == [
        ("FLASH_ATTN", 1),
        ("SPARSEK", 1),
        ("FLASH_ATTN", 4),
        ("SPARSEK", 4),
    ]
    assert rows[1]["tpot_ms"] == pytest.approx(5.0)
    assert rows[0]["ttft_ms"] == pytest.approx(1050.0)
    assert rows[0]["samples"] == 4
    table, full, drawn = write_results(tmp_path, "serve", rows)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        assert [float(row["tpot_ms"]) for row in csv.DictReader(file)] == [10, 5, 10, 5]
    assert json.loads(full.read_text())[1]["settings"] == "top_k=4"
    assert serve_table(rows).row_count == 4


def test_a_run_that_was_cut_off_goes_on_behind_its_last_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, jobs = tmp_path / "serve.jsonl", list[dict[str, Any]]()
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs, fails_at=2))
    with pytest.raises(RuntimeError, match="interrupted"):
        run_serve(plan(), MACHINE, path, lambda _: None)
    known = path.read_text().splitlines()
    assert len(known) == 1 + 2 + 1
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    rows = run_serve(plan(), MACHINE, path, lambda _: None)
    assert path.read_text().splitlines()[:4] == known
    assert [len(job["left"]) for job in jobs] == [2, 2, 1, 2, 2]
    assert all(len(job["cases"]) == 2 for job in jobs)  # engines are as long as at first
    assert [row["samples"] for row in rows] == [4] * 4
    elsewhere = replace(MACHINE, gpu="none")
    told: list[str] = []
    assert run_serve(plan(), elsewhere, path, told.append) == rows  # without an engine
    assert len(jobs) == 5
    assert len(told) == 4
    assert "has it (gpu, commit abc); another --name" in told[0]
    with pytest.raises(ValueError, match="measured with gpu 'gpu' and not 'none'"):
        run_serve(plan(rounds=3), elsewhere, path, lambda _: None)
    with pytest.raises(ValueError, match="measured with repeats 2 and not 3"):
        run_serve(plan(repeats=3), MACHINE, path, lambda _: None)


def test_contexts_and_requests_are_crossed_and_checked() -> None:
    assert parse_cases([2048, 131072], [1, 4])[1:3] == (ServeCase(2048, 4), ServeCase(131072, 1))
    with pytest.raises(ValueError, match="requests: expected"):
        parse_cases([2048], [0])


def test_bad_plans_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    path = tmp_path / "serve.jsonl"
    with pytest.raises(ValueError, match="output_tokens"):
        run_serve(plan(output_tokens=1), MACHINE, path, lambda _: None)
    with pytest.raises(ValueError, match="model: expected a folder or one of"):
        run_serve(plan(model="no-such-model"), MACHINE, path, lambda _: None)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_are_consistent(name: str, tmp_path: Path) -> None:
    config = json.loads((write_shape(name, tmp_path) / "config.json").read_text())
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--sparsek", "{"], "JSON object"),
        (["--sparsek", '{"top_q": 1}'], "top_q"),
        (["--context", "soon"], "context"),
        (["--baseline", "sparsek"], "baseline: expected another backend than ours"),
        (["--out", "/dev/null"], "File exists: '/dev/null'"),
    ],
)
def test_bad_arguments_exit_2(extra: list[str], message: str, tmp_path: Path) -> None:
    arguments = ["serve", "--model", "tiny", "--out", str(tmp_path), *extra]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.engine
def test_a_tiny_shape_is_served_by_both_backends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU SPARSEK alone has processes of its own; they spend their time on importing vLLM."""
    real, open_engine = plans.run_worker, serve_worker.open_engine

    def run(module: str, job: dict[str, Any], **options: Any) -> None:
        if job["settings"] is not None or torch.cuda.is_available():
            real(module, job, **options)
            return
        forget_engines()
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(
                serve_worker,
                "open_engine",
                lambda *a, **kw: open_engine(*a, **{**kw, "in_process": True}),
            ),
            quickly(),
        ):
            serve_worker.work(job)

    monkeypatch.setattr(plans, "run_worker", run)
    arguments = ["serve", "--model", "tiny", "--out", str(tmp_path), "--context", "512"]
    arguments += ["--context", "64", "--requests", "2", "--repeats", "1", "--output-tokens", "8"]
    arguments += [] if torch.cuda.is_available() else ["--dtype", cpu_dtype()]
    settings = '{"dense_below": 0, "top_k": 1, "window_size": 64}'
    result = CliRunner().invoke(app, [*arguments, "--sparsek", settings])
    assert result.exit_code == 0, result.output
    own, ours, _, short = json.loads((tmp_path / "serve.json").read_text())
    assert (own["backend"], ours["backend"]) == ("vLLM's own", "SPARSEK")
    assert own["ttft_ms"] > 0
    assert ours["tpot_ms"] > 0
    assert ours["attended_share"] < 0.7
    assert short["attended_share"] == 1.0  # each case's own

"""`sparsek bench serve`: plans, rows, files, and one real run of a tiny shape."""

from __future__ import annotations

import csv
import json
import os
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
from sparsek_backend.machine import Machine
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


def fake_worker(jobs: list[dict[str, Any]]) -> Any:
    def run(module: str, job: dict[str, Any], **_: Any) -> dict[str, Any]:
        jobs.append(job)
        assert (Path(job["model"]) / "config.json").is_file()
        speed = 1.0 if job["settings"] is None else 0.5
        cases = [
            {**case, "ttft_s": [speed, speed * 1.1], "tpot_s": [speed / 100] * case["requests"]}
            for case in job["cases"]
        ]
        return {"cases": cases, "kv_cache_tokens": 9, "attended_share": 0.2}

    return run


def test_both_backends_run_in_turn_and_become_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(plans, "run_worker", fake_worker(jobs))
    rows = run_serve(plan(), MACHINE, lambda _: None)
    order = ["ours" if job["settings"] is not None else job["baseline"] for job in jobs]
    assert order == ["FLASH_ATTN", "ours", "ours", "FLASH_ATTN"]
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


def test_contexts_and_requests_are_crossed_and_checked() -> None:
    assert parse_cases([2048, 131072], [1, 4])[1:3] == (ServeCase(2048, 4), ServeCase(131072, 1))
    with pytest.raises(ValueError, match="requests: expected"):
        parse_cases([2048], [0])


def test_bad_plans_are_refused_before_an_engine_starts() -> None:
    with pytest.raises(ValueError, match="output_tokens"):
        run_serve(plan(output_tokens=1), MACHINE, lambda _: None)
    with pytest.raises(ValueError, match="model: expected a folder or one of"):
        run_serve(plan(model="no-such-model"), MACHINE, lambda _: None)


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

    def run(module: str, job: dict[str, Any], **options: Any) -> dict[str, Any]:
        if job["settings"] is not None or torch.cuda.is_available():
            return real(module, job, **options)
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
            return serve_worker.work(job)

    monkeypatch.setattr(plans, "run_worker", run)
    arguments = ["serve", "--model", "tiny", "--out", str(tmp_path), "--context", "512"]
    arguments += ["--requests", "2", "--repeats", "1", "--output-tokens", "8"]
    settings = '{"dense_below": 0, "top_k": 1, "window_size": 64}'
    result = CliRunner().invoke(app, [*arguments, "--sparsek", settings])
    assert result.exit_code == 0, result.output
    own, ours = json.loads((tmp_path / "serve.json").read_text())
    assert (own["backend"], ours["backend"]) == ("vLLM's own", "SPARSEK")
    assert own["ttft_ms"] > 0
    assert ours["tpot_ms"] > 0
    assert ours["attended_share"] < 0.7

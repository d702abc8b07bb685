"""Context parallelism on GPUs with NCCL: the benchmark's checks against fp64, and the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsek_backend.bench.results import read_csv
from tests import processes
from tests.distributed.test_demo import killed_and_resumed

ROOT = Path(__file__).parents[2]


def torchrun(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script on ``count`` GPUs."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return processes.run(*command, "--nproc-per-node", count, *arguments, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4, 8])
def test_benchmark_is_green(count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA GPUs")
    csv, file = tmp_path / "rows.csv", tmp_path / "profile.json"
    benchmark = str(ROOT / "benchmarks" / "distributed.py")
    options = ("--tokens", "8192", "--samples", "1", "--csv", str(csv), "--profile", str(file))
    done = torchrun(count, benchmark, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_csv(csv)
    assert {row.op.removeprefix("context_parallel_") for row in rows} == {
        "sink_window",
        "ring",
        "block_sparse",
        "nsa",
        "nsa_chosen",
    }
    assert all(row.is_timed for row in rows)
    for row in json.loads(file.read_text()):
        assert any(name.startswith("nccl") for name in row["by_name_ms"]), row["by_name_ms"]
        parts = row["compute_ms"] + row["exposed_ms"] + row["gap_ms"]
        assert parts == pytest.approx(row["span_ms"])


@pytest.mark.gpu
def test_long_sequences_have_predicted_times_and_peaks(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    csv, lengths = tmp_path / "rows.csv", ("16384", "32768", "65536")
    benchmark = str(ROOT / "benchmarks" / "distributed.py")
    done = torchrun(2, benchmark, "--samples", "1", "--csv", str(csv), "--long", *lengths)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_csv(csv)
    assert len(rows) == 6
    for row in rows:
        assert row.peak_mib is not None
        assert "predicted_ms=" in row.params
        assert "predicted_peak_mib=" in row.params


@pytest.mark.gpu
def test_transformers_trainer_under_fsdp2(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    pytest.importorskip("accelerate", reason="accelerate is not installed; the Trainer needs it")
    transformers = pytest.importorskip("transformers")
    example = [str(ROOT / "examples" / "train_transformers_fsdp2.py"), str(tmp_path)]
    for steps in ("3", "5"):  # the second goes on from a checkpoint
        done = torchrun(2, *example, "--tokens", "256", "--save-every", "2", "--steps", steps)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "trained FSDPLlamaForCausalLM" in done.stdout
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_demo_of_two_gpus_has_the_losses_of_one(kind: str, tmp_path: Path) -> None:
    """In bf16, and killed: one GPU goes on."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    options = ("--model", kind, "--device", "cuda", "--max-length", "1024")
    runs = killed_and_resumed(tmp_path, *options, "--steps", "30", "--save-every", "10")
    assert runs["broken"]["resumed_at"] > 0
    assert runs["broken"]["losses"] == pytest.approx(runs["whole"]["losses"], abs=0.05)

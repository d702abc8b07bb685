"""Context parallelism on GPUs with NCCL: the benchmark's checks against fp64, and the demo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.bench.results import read_csv
from sparsek_backend.distributed import SequenceLayout
from tests import processes
from tests.distributed import cases
from tests.distributed.group import Ranks
from tests.distributed.test_attention import BAD, check, check_refused
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


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Ranks]:
    """A rank on each of two or four GPUs, with NCCL."""
    count = 4 if torch.cuda.device_count() >= 4 else 2
    if torch.cuda.device_count() < count:
        pytest.skip("needs 2 CUDA GPUs")
    group = Ranks(count, device="cuda")
    yield group
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("cu_seqlens", [None, (0, 56, 56, 480, 1520, 1536)], ids=["one", "packed"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("num_sink", [0, 4, 65])
@pytest.mark.parametrize("count", [2, 4])
def test_windows_and_rings(
    gpu_ranks: Ranks, count: int, num_sink: int, order: Any, cu_seqlens: tuple[int, ...] | None
) -> None:
    """In bf16, against fp64: windows shorter and longer than a shard; a ring has no sinks."""
    if count > gpu_ranks.world:
        pytest.skip(f"needs {count} CUDA GPUs")
    layout = SequenceLayout(1536, count, order, cu_seqlens)
    for window in (136, layout.tokens_per_rank + 8):
        check(gpu_ranks, layout, num_sink=num_sink, window_size=window)
    if num_sink == 0:
        check(gpu_ranks, layout)


@pytest.mark.gpu
@pytest.mark.parametrize(("changed", "error", "message"), BAD.values(), ids=BAD)
def test_bad_argument_is_an_error_on_every_rank(
    gpu_ranks: Ranks, changed: Any, error: type[Exception], message: str
) -> None:
    """A mesh of the wrong size and shards that differ among them."""
    check_refused(gpu_ranks, changed, error, message)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["before", "within"])
def test_dead_rank_is_an_error_within_a_minute(gpu_ranks: Ranks, where: str) -> None:
    """The others raise; or NCCL's watchdog ends them, where they wait for a message on the GPU.

    The first rank may have sent all that the dead one was to have, and needs nothing of it.
    """
    group = Ranks(gpu_ranks.world, timeout=20.0, device="cuda")
    try:
        group.run(group.world, cases.call_with, {})
        begin = time.monotonic()
        for done, what in group.outcomes(group.world, cases.die_and_call_again, where)[:-1]:
            assert not done
            if where == "before":
                assert what[0] == "RuntimeError"
                assert what[1].startswith(f"mesh: expected an answer of all {group.world} ranks")
            else:
                assert what[0] in ("RuntimeError", "EOFError"), what
        assert time.monotonic() - begin < 60
    finally:
        group.close()


@pytest.mark.gpu
def test_example_on_several_gpus_has_the_losses_of_one(tmp_path: Path) -> None:
    """FSDP2 with context parallelism over two; with tensor parallelism over two more as well."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    runs = {1: [], 2: ["--context-parallel", "2"]}
    if torch.cuda.device_count() >= 4:
        runs[4] = [*runs[2], "--tensor-parallel", "2"]
    example, losses = str(ROOT / "examples" / "train_context_parallel.py"), {}
    for count, parallel in runs.items():
        small = ["--tokens", "1024", "--batch", "2", "--steps", "8"]
        done = torchrun(count, example, str(tmp_path / str(count)), *small, *parallel)
        assert done.returncode == 0, done.stderr[-3000:]
        said = (line.split() for line in done.stdout.splitlines())
        losses[count] = [float(words[-1]) for words in said if words[:1] == ["step"]]
    assert len(losses[1]) == 8
    for found in losses.values():
        assert found == pytest.approx(losses[1], abs=0.02)

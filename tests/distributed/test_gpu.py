"""Context parallelism on GPUs with NCCL: the benchmark's checks against fp64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsek_backend.bench.results import read_csv

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4, 8])
def test_benchmark_is_green(count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA GPUs")
    csv = tmp_path / "rows.csv"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), str(ROOT / "benchmarks" / "distributed.py")),
            *("--tokens", "8192", "--samples", "1", "--csv", str(csv)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_csv(csv)
    assert {row.op.removeprefix("context_parallel_") for row in rows} == {
        "sink_window",
        "ring",
        "nsa",
        "nsa_chosen",
    }
    assert all(row.is_timed for row in rows)

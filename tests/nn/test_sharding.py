"""The NSA layer and its model under FSDP2: two processes on the CPU, one and two GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests import processes


def on_gpus(count: int) -> object:
    """A case that needs that many GPUs."""
    missing = torch.cuda.device_count() < count
    skip = pytest.mark.skipif(missing, reason=f"needs {count} CUDA GPUs")
    return pytest.param("cuda", count, marks=[pytest.mark.gpu, skip], id=f"{count}-gpu")


@pytest.mark.parametrize(
    ("device", "ranks"), [pytest.param("cpu", 2, id="cpu"), on_gpus(1), on_gpus(2)]
)
def test_fully_sharded_layer(device: str, ranks: int, tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = processes.import_path(here.parents[1], here.parents[1] / "kernels")
    done = processes.run(
        *(sys.executable, here / "sharded_layer.py", device, ranks, tmp_path),
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sharded layer agrees" in done.stdout

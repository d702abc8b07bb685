"""Scores of prefill tiles by exact block masses: see ``mass_cases.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mass_cases import BOUND, HOPPER, PORTABLE, Case, error

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RANGES = [(0, 1 << 20), (1, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where there is no GPU")
@pytest.mark.parametrize(("first", "count"), RANGES, ids=["all tiles", "some tiles"])
@pytest.mark.parametrize("case", PORTABLE, ids=lambda case: case.name)
def test_portable_kernels_agree_with_the_oracle(case: Case, first: int, count: int) -> None:
    assert error(case, torch.float32, "cpu", first, count) <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*PORTABLE, *HOPPER], ids=lambda case: case.name)
def test_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    assert error(case, dtype, "cuda", 0, 1 << 20) <= BOUND


@pytest.mark.parametrize("timing", [[], ["--early"]], ids=["late", "early"])
@pytest.mark.parametrize("order", ["first first", "last first"])
def test_the_kernel_for_hopper_agrees_with_the_oracle(order: str, timing: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "mass_cases.py"), "--hopper", "--order", order, *timing],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
        check=False,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]

"""The paged kernels for Hopper without such a GPU: see ``hopper_cases.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import processes

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.parametrize("timing", [[], ["--early"]], ids=["late", "early"])
@pytest.mark.parametrize("order", ["first first", "last first"])
def test_hopper_kernels_agree_with_the_oracle(order: str, timing: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = processes.run(
        *(sys.executable, HERE / "hopper_cases.py", "--order", order, *timing),
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]
    assert sum(line.startswith("ok") for line in done.stdout.splitlines()) > 25

"""Kernels in interpreters, in processes of their own: Triton decides when it is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import processes


@pytest.mark.parametrize(
    ("name", "interpreted"), [("interpreted.py", "1"), ("interpreted_hopper.py", "0")]
)
def test_kernels_in_the_interpreter(name: str, interpreted: str) -> None:
    script = Path(__file__).with_name(name)
    done = processes.run(
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", script),
        env={**os.environ, "TRITON_INTERPRET": interpreted},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

"""Kernels in interpreters, in processes of their own: Triton decides when it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import scripts


@pytest.mark.parametrize(
    ("name", "interpret"), [("interpreted.py", True), ("interpreted_hopper.py", False)]
)
def test_kernels_in_the_interpreter(name: str, interpret: bool) -> None:
    script = Path(__file__).with_name(name)
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", script)
    done = scripts.run(*command, interpret=interpret)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

"""The paged kernels for Hopper without such a GPU: see ``hopper_cases.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import scripts


@pytest.mark.parametrize(
    ("order", "timing", "part"),
    [
        # Each case meets both orders and both timings, neighbours together all four ways.
        ("first first", [], "0/2"),
        ("last first", ["--early"], "0/2"),
        ("first first", ["--early"], "1/2"),
        ("last first", [], "1/2"),
    ],
    ids=["first-late", "last-early", "first-early", "last-late"],
)
def test_hopper_kernels_agree_with_the_oracle(order: str, timing: list[str], part: str) -> None:
    script = Path(__file__).with_name("hopper_cases.py")
    done = scripts.run(script, "--order", order, *timing, "--part", part)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]
    checks = 21
    assert sum(line.startswith("ok") for line in done.stdout.splitlines()) == checks

"""Every kernel compiles for the GPUs that matter, without one, and keeps its state in registers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels import scripts

MATRIX = ("_fwd_kernel", "_dkdv_kernel", "_dq_kernel", "hopper_bwd_kernel", "_small_kernel")
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Bytes of stack a thread may have: loop invariants, never accumulators.  The portable dk/dv kernel
# on Hopper holds two fp32 accumulators of 64 registers and gains more from its wide tile than it
# loses.
STACK = {"default": 160, ("sink_window_bwd_dkdv_kernel", 90): 512}


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile(arch: int) -> None:
    pytest.importorskip("triton")
    done = scripts.run(Path(__file__).with_name("aot.py"), arch)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == (16 if arch == 90 else 7)
    for line in lines:
        assert line["shared"] <= SHARED[arch], line
        limit = STACK.get((line["kernel"], arch), STACK["default"])
        assert line["stack"] <= limit, line
        if line["kernel"].endswith(MATRIX):
            assert line["hgmma"] if arch == 90 else line["mma"], line

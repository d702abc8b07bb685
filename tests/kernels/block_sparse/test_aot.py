"""Every kernel compiles for the GPUs that matter, without one, and keeps its state in registers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels import scripts

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Bytes of stack a thread may have: loop invariants, never accumulators.  On Hopper two kernels give
# each warp more rows than fit without, and are faster so.
STACK = {
    "default": 160,
    ("block_sparse_fwd_kernel", 90): 240,
    ("block_sparse_bwd_dkdv_kernel", 90): 320,
}


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile(arch: int) -> None:
    pytest.importorskip("triton")
    done = scripts.run(Path(__file__).with_name("aot.py"), arch)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == (9 + 1 + 4 * 4 if arch == 90 else 9)
    for line in lines:
        assert line["shared"] <= SHARED[arch], line
        assert line["stack"] <= STACK.get((line["kernel"], arch), STACK["default"]), line
        if not line["kernel"].endswith(("parts_kernel", "queue_kernel")):
            assert line["hgmma"] if arch == 90 else line["mma"], line
        if "hopper" in line["kernel"]:
            # One wait after every product instead of one for all: the assembler gave up.
            assert line["waits"] < line["hgmma"] / 2, line

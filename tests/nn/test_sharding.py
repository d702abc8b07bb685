"""The NSA layer under FSDP2, in two processes on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_fully_sharded_layer() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here.parents[1] / "kernels")])
    done = subprocess.run(
        [sys.executable, str(here / "sharded_layer.py"), str(port)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sharded layer agrees" in done.stdout

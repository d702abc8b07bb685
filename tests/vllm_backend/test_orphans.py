"""An engine whose server was killed is ended; nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from sparsek_backend.vllm_backend import orphans
from tests.vllm_backend.servers import wait_until

ROOT = Path(__file__).resolve().parents[2]

WORKER = f"""
import sys, time
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from sparsek_backend.vllm_backend import orphans
orphans.POLL_SECONDS = 0.05
orphans.end_with_server()
orphans.end_with_server()
print(orphans.engine_process().pid, flush=True)
time.sleep(3600)
"""


def test_a_process_that_is_no_engine_watches_nothing() -> None:
    assert orphans.engine_process() is None
    orphans.end_with_server()
    assert orphans._watched == set()


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_engine_ends_after_its_server_is_killed() -> None:
    """A shell stands for the server; the engine is a Python process with vLLM's title."""
    line = f'exec -a VLLM::EngineCore "{sys.executable}" -u -c "$WORKER"'
    server = subprocess.Popen(
        ["bash", "-c", f"({line}) & wait"],
        env={**os.environ, "WORKER": WORKER, "PYTHONHOME": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    assert runs(engine)
    time.sleep(0.3)  # several looks at a server that is there
    assert runs(engine)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    server.stdout.close()
    wait_until(lambda: not runs(engine))

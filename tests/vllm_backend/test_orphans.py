"""An engine whose server was killed is ended; nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sparsek_backend.vllm_backend import orphans
from tests import processes
from tests.processes import wait_until

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
        start_new_session=True,
    )
    with processes.ended(server):
        assert server.stdout is not None
        engine = psutil.Process(int(server.stdout.readline()))
        assert runs(engine)
        time.sleep(0.3)  # several looks at a server that is there
        assert runs(engine)
        server.kill()
        server.wait()
        server.stdout.close()
        wait_until(lambda: not runs(engine))


def test_an_engine_that_leads_its_process_group_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it, such as Ray, may be in another group."""
    groups = {7: 7, 3: 3}
    monkeypatch.setattr(orphans.os, "getpgid", groups.__getitem__)
    engine, parent = SimpleNamespace(pid=7), SimpleNamespace(pid=3)
    assert orphans._is_server(parent, engine)
    groups[7] = 5  # of a server that is gone
    assert not orphans._is_server(parent, engine)


SERVER = f"""
import multiprocessing, os, sys, time
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from sparsek_backend.vllm_backend import orphans

def engine():
    server = os.getppid()
    print(os.getpid(), flush=True)
    while os.getppid() == server:  # it loads the model
        time.sleep(0.05)
    print(orphans.engine_process().pid, flush=True)
    orphans.end_with_server()
    time.sleep(3600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    context.set_executable(sys.argv[1])
    context.Process(target=engine).start()
    time.sleep(3600)
"""


def test_engine_whose_server_was_killed_while_it_loaded_ends(tmp_path: Path) -> None:
    """Its parent is then another process, which does not end."""
    titled, script = tmp_path / "VLLM::EngineCore", tmp_path / "server.py"
    titled.symlink_to(os.path.realpath(sys.executable))
    script.write_text(SERVER)
    server = subprocess.Popen(
        [sys.executable, script, titled],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with processes.ended(server):
        assert server.stdout is not None
        engine = psutil.Process(int(server.stdout.readline()))
        server.kill()
        server.wait()
        assert int(server.stdout.readline()) == engine.pid
        wait_until(lambda: not runs(engine))
        assert server.stdout.read() == ""
        server.stdout.close()

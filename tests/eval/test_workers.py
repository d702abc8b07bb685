"""Worker processes: progress, results, crashes that name their job."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sparsek_backend.eval.workers import WorkerError, run_worker
from tests.processes import wait_until

SCRIPT = """
import os, subprocess, sys, time
from sparsek_backend.eval.workers import report_progress, serve_job

def work(job):
    print("a log line", flush=True)
    report_progress("halfway")
    if job["do"] == "engine":
        print("(EngineCore pid=7) ERROR 11-28 [core.py:9] ValueError: no such thing", flush=True)
        print("(EngineCore pid=7) ERROR 11-28 [core.py:9] Exception: see above", flush=True)
        print(*range(40), sep=chr(10), flush=True)
        os.kill(os.getpid(), 9)
    if job["do"] == "raise":
        raise RuntimeError("out of memory")
    if job["do"] == "die":
        os.kill(os.getpid(), 9)
    if job["do"] == "hang":
        open(job.get("left", os.devnull), "w").write(str(os.getpid()))
        time.sleep(3600)
    if job["do"] == "engine_hang":
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(job["left"], "w").write(str(left.pid))
        time.sleep(3600)
    if job["do"] == "leave":
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(job["left"], "w").write(str(left.pid))
        os.kill(os.getpid(), 9)
    return {"answer": job["value"] + 1}

if __name__ == "__main__":
    serve_job(work)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_worker.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_worker"


def test_a_worker_reports_and_answers(module: str) -> None:
    lines: list[str] = []
    result = run_worker(
        module, {"do": "work", "value": 1}, label="budget 'x'", on_progress=lines.append
    )
    assert result == {"answer": 2}
    assert lines == ["halfway"]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", r"budget 'x'.*status 1(.|\n)*out of memory"),
        ("die", r"budget 'x'.*status -9"),
        ("engine", r"budget 'x'.*status -9\n.*ValueError: no such thing\n  25\n"),
    ],
)
def test_a_crash_names_its_job_and_shows_its_log(module: str, do: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run_worker(module, {"do": do}, label="budget 'x'", on_progress=lambda _: None)


def test_a_silent_worker_is_ended(module: str) -> None:
    with pytest.raises(WorkerError, match="budget 'x': the worker said nothing for 1 s"):
        run_worker(
            module, {"do": "hang"}, label="budget 'x'", on_progress=lambda _: None, timeout=1
        )


def test_what_a_dead_worker_leaves_behind_is_not_waited_for(module: str, tmp_path: Path) -> None:
    """It still runs, with the worker's output open, when the error is raised."""
    job = {"do": "leave", "left": str(tmp_path / "left")}
    try:
        with pytest.raises(WorkerError, match="status -9"):
            run_worker(module, job, label="budget 'x'", on_progress=lambda _: None)
    finally:
        left = psutil.Process(int((tmp_path / "left").read_text()))
        there = left.status()
        left.kill()
    assert there != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_engine_of_a_silent_worker_is_ended(module: str, tmp_path: Path) -> None:
    job = {"do": "engine_hang", "left": str(tmp_path / "left")}
    with pytest.raises(WorkerError, match="said nothing for 5 s"):
        run_worker(module, job, label="budget 'x'", on_progress=lambda _: None, timeout=5)
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "left").read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("do", ["hang", "engine_hang"])
def test_a_worker_ends_with_a_killed_parent(do: str, module: str, tmp_path: Path) -> None:
    left = tmp_path / "left"
    job = {"do": do, "left": str(left)}
    code = f"""
from sparsek_backend.eval.workers import run_worker
run_worker({module!r}, {job!r}, label="x", on_progress=lambda _: None)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60
    while not (left.is_file() and left.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    worker = psutil.Process(int(left.read_text()))
    parent.kill()
    parent.wait()
    worker.wait(30)

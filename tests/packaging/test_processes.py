"""What tests start: a command that hangs is told of with what it said, and is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes

HANG = """
import subprocess, sys, time

def wait_for_ever(child):
    print(child.pid, flush=True)
    time.sleep(3600)

wait_for_ever(subprocess.Popen(["sleep", "3600"], start_new_session=True))
"""


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_what_a_command_says_and_its_status() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = processes.run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_command_imports_what_its_tests_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that only ``PYTHONPATH`` names, such as another version of Triton, are not lost."""
    (tmp_path / "named_by_the_path.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = os.environ | {"PYTHONPATH": processes.import_path(tmp_path / "first")}
    code = "import sys, named_by_the_path; print(sys.path[1])"
    done = processes.run(sys.executable, "-c", code, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "first")), done.stderr
    monkeypatch.delenv("PYTHONPATH")
    assert processes.import_path(tmp_path) == str(tmp_path)


def test_what_a_command_leaves_behind_is_ended() -> None:
    """It would hold a pipe open, and a port."""
    done = processes.run("sh", "-c", "sleep 3600 & echo $!")
    processes.wait_until(lambda: gone(int(done.stdout)))


def test_a_command_that_hangs_is_an_error_with_what_it_said() -> None:
    with pytest.raises(AssertionError, match=r"(?s)not ended after 2 s: sh -c .*before it hung"):
        processes.run("sh", "-c", "echo before it hung; sleep 3600", seconds=2)


def test_a_process_that_is_aborted_says_where_it_was_and_its_children_end() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", HANG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with processes.ended(process):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        processes.abort(process.pid)
        assert "in wait_for_ever" in process.communicate()[1]
        processes.wait_until(lambda: gone(child))


def test_a_condition_that_never_holds_is_an_error_with_what_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "SECONDS", 0.0)
    with pytest.raises(AssertionError, match=r"not after 0 s\nthe log"):
        processes.wait_until(lambda: False, lambda: "the log")

"""Commands that tests run: each ends, or fails its test with what it said, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

SECONDS = 600.0
"""What no command of a test takes on any machine; a test has twice as long (pyproject.toml)."""
_LAST_WORDS = 10.0


def import_path(*folders: Path) -> str:
    """``PYTHONPATH`` of a command: these folders, then those of this process.

    The command then runs on the packages that are tested here.
    """
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


def run(
    *command: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        command: the program and its arguments.
        cwd: its folder; this process's own by default.
        env: all its variables; this process's own by default.
        seconds: how long it may take.

    Raises:
        AssertionError: it took longer; the message has what it said, and where the threads of its
            Python processes were.
    """
    words = [str(word) for word in command]
    given = dict(os.environ if env is None else env)
    # Files, not pipes: what the command leaves behind could hold a pipe open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={"PYTHONFAULTHANDLER": "1", **given},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        with ended(process):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                abort(process.pid)
                raise AssertionError(
                    f"not ended after {seconds:g} s: {' '.join(words)}\n{_text(out)}\n{_text(err)}"
                ) from None
        return subprocess.CompletedProcess(words, process.returncode, _text(out), _text(err))


def wait_until(holds: Callable[[], bool], said: Callable[[], str] = str) -> None:
    """Return when a condition holds.

    Args:
        holds: the condition.
        said: what tells why it does not, such as a log.

    Raises:
        AssertionError: it never did.
    """
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not after {SECONDS:g} s\n{said()}"
        time.sleep(0.1)


def abort(pid: int) -> None:
    """End a process and its descendants; those with Python's faulthandler say where they were."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        family = [*first.children(recursive=True), first]
        for end in (signal.SIGABRT, signal.SIGKILL):
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(end)
            psutil.wait_procs(family, _LAST_WORDS)


@contextmanager
def ended(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[None]:
    """At the end nothing is left of the session of a process."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")

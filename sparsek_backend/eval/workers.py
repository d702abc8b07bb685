"""Workers: a subprocess for each engine, so that its memory is freed and a crash names its job.

A worker module is run as `python -m MODULE JOB.json RESULT.json`; it prints progress as lines that
begin with `PROGRESS ` and writes its result when it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsek_backend.engine_log import ENGINE_ERROR

PROGRESS = "PROGRESS "
SILENCE_LIMIT = 1800.0
"""Seconds that an engine's worker may stay silent before it counts as hung."""
_TAIL_LINES = 15
_POLL_SECONDS = 0.2
_END_SECONDS = 10.0


class WorkerError(RuntimeError):
    """A worker failed; the message has its label, its engine's error and the end of its log."""


def run_worker(
    module: str,
    job: Mapping[str, Any],
    *,
    label: str,
    on_progress: Callable[[str], None] = lambda message: None,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run one worker to its end.

    Args:
        environment: variables that it has beside those of this process.
        timeout: seconds without any output after which the worker is ended; an engine's by default.

    Raises:
        WorkerError: the worker failed, or stayed silent for too long.
    """
    limit = timeout or SILENCE_LIMIT
    own = {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    cause: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sparsek-worker-") as folder:
        job_path, result_path, log = (Path(folder, name) for name in ("job", "result", "log"))
        job_path.write_text(json.dumps(job), encoding="utf-8")
        # A file, not a pipe: what the worker leaves behind could hold a pipe open for ever.
        with log.open("w") as out, log.open(errors="replace") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(job_path), str(result_path)],
                stdin=subprocess.PIPE,  # which closes with this process: see `serve_job`
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **(environment or {})},
            )
            heard, part, ended = time.monotonic(), "", False
            try:
                while not ended and time.monotonic() - heard <= limit:
                    time.sleep(_POLL_SECONDS)
                    ended = process.poll() is not None
                    *whole, part = (part + said.read() + ("\n" if ended else "")).split("\n")
                    for line in whole:
                        heard = time.monotonic()
                        if line.startswith(PROGRESS):
                            on_progress(line.removeprefix(PROGRESS).strip())
                        elif line.strip():
                            tail.append(line.rstrip())
                            if not cause and ENGINE_ERROR.search(line):
                                cause = [line.rstrip()]
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_END_SECONDS)  # closes its input
                process.kill()
                process.wait()
        if not ended:
            reason = f"the worker said nothing for {limit:g} s and was ended"
        elif process.returncode == 0 and result_path.is_file():
            return dict(json.loads(result_path.read_text(encoding="utf-8")))
        else:
            reason = f"the worker ended with status {process.returncode}"
    raise WorkerError(f"{label}: {reason}\n  " + "\n  ".join([*cause, *tail]))


def python_path(*folders: Path) -> str:
    """The ``PYTHONPATH`` of a process: some folders, those of our packages, then this process's."""
    root = Path(__file__).resolve().parents[2]
    paths = (*folders, root, root / "kernels", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, map(str, paths)))


def report_progress(message: str) -> None:
    """Print a line that the process which started this worker shows as progress."""
    print(PROGRESS + message, flush=True)


def serve_job(work: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None:
    """The main function of a worker module: read the job, work, write the result.

    A worker ends with its parent, and so do the engine's processes: a parent that is killed could
    not end them, and they would hold a GPU.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job_path, result_path = (Path(argument) for argument in sys.argv[1:3])
    result = work(json.loads(job_path.read_text(encoding="utf-8")))
    result_path.write_text(json.dumps(result or {}), encoding="utf-8")


def _end_with_parent() -> None:
    """End this process and all that it started, once its input is closed."""
    while os.read(0, 1):
        pass
    for pid in (*_descendants(os.getpid()), os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    """Processes that a process started, and what they started; Linux alone tells."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in map(int, children.read_text().split()):
                yield from _descendants(child)
                yield child

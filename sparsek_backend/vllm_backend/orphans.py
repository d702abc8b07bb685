"""An engine ends when its server is killed.

``kill -9`` of ``vllm serve`` leaves its engine process without a parent; it would go on holding
its memory, and the next server might not find enough.  The process that runs the model watches for
that.  Engines inside the user's own process have no server, and are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
_ENGINE_TITLE = b"::EngineCore"
_watched: set[int] = set()


def end_with_server() -> None:
    """Watch the engine process that this process is, or works for; once per process."""
    engine = engine_process()
    if engine is None or engine in _watched:
        return
    server = parent_of(engine)
    if server is None:
        return
    _watched.add(engine)
    threading.Thread(
        target=_watch, args=(engine, server), name="sparsek-orphans", daemon=True
    ).start()


def engine_process() -> int | None:
    """Return the engine process of a server: this one or its parent, by vLLM's process titles."""
    for process in (os.getpid(), os.getppid()):
        try:
            title = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if _ENGINE_TITLE in title.split(b"\0", 1)[0]:
            return process
    return None


def parent_of(process: int) -> int | None:
    """Return a process's parent, or ``None`` where the process or /proc is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return int(fields[1])


def _watch(engine: int, server: int) -> None:
    while parent_of(engine) == server:
        time.sleep(POLL_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if parent_of(engine) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, number)
        time.sleep(GRACE_SECONDS)

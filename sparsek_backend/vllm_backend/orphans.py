"""An engine ends when its server is killed.

``kill -9`` of ``vllm serve`` leaves its engine process without a parent; it would go on holding
its memory, and the next server might not find enough.  The process that runs the model watches for
that.  Engines inside the user's own process have no server, and are left alone.
"""

from __future__ import annotations

import os
import threading
import time

import psutil

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
_ENGINE_TITLE = "::EngineCore"
_watched: set[psutil.Process] = set()


def end_with_server() -> None:
    """Watch the engine process that this process is, or works for; once per process."""
    engine = engine_process()
    server = None if engine is None else engine.parent()
    if engine is None or engine in _watched or server is None:
        return
    _watched.add(engine)
    threading.Thread(
        target=_watch, args=(engine, server), name="sparsek-orphans", daemon=True
    ).start()


def engine_process() -> psutil.Process | None:
    """Return the engine process of a server: this one or its parent, by vLLM's process titles."""
    this = psutil.Process()
    for process in (this, this.parent()):
        try:
            if process is not None and _ENGINE_TITLE in "".join(process.cmdline()[:1]):
                return process
        except psutil.Error:
            continue
    return None


def _is_server(parent: psutil.Process, engine: psutil.Process) -> bool:
    """Whether the engine's parent started it.

    Where the server was killed while its engine loaded the model, another process has inherited
    the engine, one of another process group.  An engine that leads a group of its own was put
    there by its parent, which may be Ray.
    """
    try:
        group = os.getpgid(engine.pid)
        return group in (engine.pid, os.getpgid(parent.pid))
    except ProcessLookupError:
        return False


def _watch(engine: psutil.Process, server: psutil.Process) -> None:
    try:
        while engine.parent() == server and _is_server(server, engine):
            time.sleep(POLL_SECONDS)
        for end in (engine.terminate, engine.kill):
            end()
            psutil.wait_procs([engine], GRACE_SECONDS)
    except psutil.NoSuchProcess:
        return  # it ended by itself

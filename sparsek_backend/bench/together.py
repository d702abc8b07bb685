"""Work in threads that ends together: where one fails, what the others run is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class Together:
    """What the threads of one call run now, and how each of it is stopped."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stops: list[Callable[[], None]] = []
        self._over = False

    def call(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Results of functions that run at once, each in a thread of its own.

        The first exception stops what all of them run, and is raised when they have ended.
        """
        with ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(work) for work in works]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                self._stop()
        return [future.result() for future in futures]

    @contextlib.contextmanager
    def running(self, stop: Callable[[], None]) -> Iterator[None]:
        """Something runs in here; ``stop`` ends it, at the end and where another work fails.

        Raises:
            RuntimeError: another work failed already.
        """
        try:
            with self._lock:
                if self._over:
                    raise RuntimeError("stopped, because another failed")
                self._stops.append(stop)
            yield
        finally:
            stop()
            with self._lock, contextlib.suppress(ValueError):
                self._stops.remove(stop)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """The end of a command, with its output and its errors in ``stdout``."""
        with subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:

            def kill() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            with self.running(kill):
                output, _ = process.communicate()
        return subprocess.CompletedProcess(list(command), process.returncode, output, "")

    def _stop(self) -> None:
        with self._lock:
            self._over = True
            stops, self._stops = self._stops, []
        for stop in reversed(stops):  # clients before their servers
            stop()

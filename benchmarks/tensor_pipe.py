"""Share of the time that tensor cores are busy in the forward kernel of block-sparse attention.

    python benchmarks/tensor_pipe.py --json tensor_pipe.json             # a Hopper GPU with ncu
    python benchmarks/tensor_pipe.py --toy --json /tmp/toy.json          # seconds on a CPU

The case is `b128` of benchmarks/block_sparse.yaml, gated and timed as `sparsek bench kernels` does.
Then one launch runs under NVIDIA's `ncu`, which leaves the clock as it is.  Beside its counters are
shares of the peak rate by arithmetic: the matrix products of listed blocks, and of visible pairs
alone, over the time.  The toy is not profiled.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

from sparsek_backend.bench.ceilings import measure_ceilings
from sparsek_backend.bench.ops import OPS
from sparsek_backend.bench.ops.block_sparse import draw_blocks
from sparsek_backend.bench.registry import OURS, Case
from sparsek_backend.bench.results import Row
from sparsek_backend.bench.runner import run_case
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.workload import load_workloads
from sparsek_backend.machine import Machine, choose_device, describe_machine

OP, CASE = "block_sparse_fwd", "b128"
KERNEL = "block_sparse_hopper_fwd"
BAR = 0.7
PEAK_TFLOPS = 989.0
"""Of an H100 and an H200, dense products of 16 bits, by the data sheet."""

DURATION = "gpu__time_duration.sum"
_OF_PEAK = "pct_of_peak_sustained"
CYCLES = [
    f"sm__pipe_tensor{kind}_cycles_active.avg.{_OF_PEAK}_{base}"
    for kind in ("", "_op_hmma")
    for base in ("active", "elapsed")
]
"""Busy cycles of the tensor pipe, what is preferred first."""
INSTRUCTIONS = [
    f"sm__inst_executed_pipe_tensor{kind}.avg.{_OF_PEAK}_active"
    for kind in ("", "_op_hmma", "_op_gmma")
]
ATTEMPTS = [[*CYCLES, *INSTRUCTIONS], CYCLES[:2], CYCLES[2:], INSTRUCTIONS]
"""Some versions of ncu refuse a run that asks for a metric they do not know."""

_TO_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
_TO_MS |= {"nsecond": 1e-6, "usecond": 1e-3, "msecond": 1.0, "second": 1e3}


def the_case(toy: bool) -> Case:
    """The workload's case, or a small one."""
    workloads = load_workloads(Path(__file__).with_name("block_sparse.yaml"))
    (case,) = (case for op, case in workloads if (op.name, case.name) == (OP, CASE))
    if not toy:
        return case
    small = {"num_heads": 4, "num_kv_heads": 2, "patterns": 2, "head_dim": 32, "dtype": "float32"}
    return replace(case, spec=parse_spec("q1k"), params={**case.params, **small})


def run_once(case: Case, device: torch.device) -> None:
    """Three calls of ours, for a profiler."""
    provider = next(p for p in OPS[OP].build(case, device) if p.name == OURS)
    call = provider.prepare()
    for _ in range(3):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()


def find_ncu(given: str) -> str:
    """Path of the profiler, or an empty string."""
    if found := shutil.which(given):
        return found
    places = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
    return str(max((path for place in places for path in Path("/").glob(place)), default=""))


def parse_ncu(text: str) -> tuple[str, dict[str, float]]:
    """Kernel and metrics that have numbers, of what ``ncu --csv --page raw`` prints.

    The program's own lines and ncu's are among them.  The time is in ms.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.reader(lines[start:]) if row]
    if len(rows) < 2:
        return "", {}
    header, *rest = rows
    units = dict(zip(header, rest[0], strict=False))
    measured = next((dict(zip(header, row, strict=False)) for row in rest if row[0].isdigit()), {})
    found: dict[str, float] = {}
    for name in (DURATION, *CYCLES, *INSTRUCTIONS):
        try:
            value = float(measured[name].replace(",", ""))
        except (KeyError, ValueError):  # left out, or "n/a"
            continue
        if math.isfinite(value):
            found[name] = value
    if DURATION in found:
        found[DURATION] *= _TO_MS.get(units.get(DURATION, ""), 1e-6)
    return measured.get("Kernel Name", ""), found


def profile(ncu: str) -> tuple[str, dict[str, float]]:
    """Kernel and metrics of one launch.

    Raises:
        RuntimeError: ncu gave no counter of tensor cores; the message has the end of its output.
    """
    said = ""
    for metrics in ATTEMPTS:
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
            "--kernel-name", f"regex:{KERNEL}", "--launch-skip", "1", "--launch-count", "1",
            "--metrics", ",".join([DURATION, *metrics]),
            sys.executable, str(Path(__file__).resolve()), "--once",
        ]  # fmt: skip
        print("ncu for", ", ".join(metrics), flush=True)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=180,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"ncu: {error}") from error
        kernel, found = parse_ncu(done.stdout)
        if set(found) - {DURATION}:
            return kernel, found
        said = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        if "ERR_NVGPUCTRPERM" in said:  # no metric would do better
            break
    raise RuntimeError(f"ncu gave no counter of tensor cores for {KERNEL}; it said:\n{said}")


def by_arithmetic(case: Case, row: Row, device: torch.device) -> dict[str, Any]:
    """Time as the bench takes it, and shares of the peak rate."""
    blocks = draw_blocks(case, case.spec.seq_lens[0], device)
    pairs = int(blocks.sum()) / blocks.shape[0] * case.int_param("block_size") ** 2
    products = 4.0 * case.int_param("head_dim") * case.int_param("num_heads") * pairs
    ms, visible = cast(float, row.ms), cast(float, row.tflops)
    listed = products / ms / 1e9
    return {
        "ms": ms, "p20_ms": row.p20_ms, "p80_ms": row.p80_ms, "samples": row.samples,
        "method": row.method, "gate": row.detail, "peak_tflops": PEAK_TFLOPS,
        "listed_tflops": listed, "listed_share_of_peak": listed / PEAK_TFLOPS,
        "visible_tflops": visible, "visible_share_of_peak": visible / PEAK_TFLOPS,
        "matmul_tflops": row.matmul_tflops,
    }  # fmt: skip


def needs_gpu(device: torch.device, *, toy: bool) -> bool:
    """Whether the run cannot be here: the kernel is Hopper's."""
    return not toy and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9)


def gate_and_time(case: Case, device: torch.device, machine: Machine) -> Row:
    """The bench's row of ours."""
    ceilings = measure_ceilings(device, [case.dtype()])
    (row,) = run_case(OPS[OP], replace(case, providers=(OURS,)), device, machine, ceilings)
    return row


def main() -> int:
    """Gate, time, profile, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="1024 tokens, without ncu")
    parser.add_argument("--once", action="store_true", help="three calls alone: what ncu runs")
    parser.add_argument("--ncu", default="ncu", help="the profiler, where it is not on the path")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.once and options.json is None:
        parser.error("--json is needed")
    case, device = the_case(options.toy), choose_device(options.device)
    if needs_gpu(device, toy=options.toy):
        print("error: needs a Hopper GPU; on a CPU there is --toy", file=sys.stderr)
        return 1
    if options.once:
        run_once(case, device)
        return 0
    machine = describe_machine(device, options.commit)
    row = gate_and_time(case, device, machine)
    if not row.is_timed:
        print(f"error: {row.status}: {row.detail}", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        "op": OP, "case": CASE, "spec": case.spec.text, "params": dict(case.params),
        **by_arithmetic(case, row, device), "machine": asdict(machine),
    }  # fmt: skip
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"gate: {row.detail}\n{row.ms:.3f} ms, {result['listed_tflops']:.1f} TFLOP/s", flush=True)
    if not options.toy:
        try:
            result |= counters(options.ncu)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(result)
    return 0


def counters(given: str) -> dict[str, Any]:
    """What ncu counts, and whether the bar is met.

    Raises:
        RuntimeError: there is no ncu, or it gave no counter of tensor cores.
    """
    ncu = find_ncu(given)
    if not ncu:
        raise RuntimeError(f"no {given} here: install NVIDIA Nsight Compute, or give --ncu PATH")
    kernel, metrics = profile(ncu)
    busy = next((metrics[name] / 100 for name in CYCLES if name in metrics), None)
    met = None if busy is None else busy > BAR
    return {
        "kernel": kernel, "metrics": metrics, "tensor_busy": busy, "bar": BAR, "bar_met": met,
        "ncu_ms": metrics.get(DURATION),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

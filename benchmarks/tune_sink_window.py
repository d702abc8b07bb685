"""Time launch configurations of sink-window attention on this GPU.

    PYTHONPATH=.:kernels python benchmarks/tune_sink_window.py [--head-dim 128] [--pass forward]
    PYTHONPATH=.:kernels python benchmarks/tune_sink_window.py --pass few-rows

Prints one line per candidate and shape, fastest first.  The winners are written into
``sparsek_kernels/sink_window/config.py`` by hand; nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from sparsek_kernels.sink_window import config as configurations
from sparsek_kernels.sink_window import launch
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec

CALLS = 50
PASSES = ("forward", "backward", "few-rows")
SHAPES = {
    "sink4-w4096": (131072, 4, 4096),
    "sink64-w1024": (131072, 64, 1024),
    "causal": (32768, 0, None),
    "causal-4k": (4096, 0, None),
    "w128": (32768, 0, 128),
    "w512": (65536, 0, 512),
}


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Median time of ``run`` on the device, after one call to compile and warm up."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """``CALLS`` of them in one CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph.replay


def forward_candidates(base: LaunchConfig) -> Iterator[tuple[str, LaunchConfig]]:
    """Tiles of the Hopper and of the portable forward kernel."""
    if base.hopper_forward is not None:
        for keys, stages in ((128, 2), (64, 3), (64, 4)):
            tile = TileConfig(128, keys, 4, stages)
            yield f"hopper 128x{keys} stages {stages}", replace(base, hopper_forward=tile)
        if base.hopper_forward.block_m == 64:
            for stages, hold_q in ((4, False), (4, True), (5, True)):
                tile = TileConfig(64, 64, 4, stages, hold_q)
                name = f"hopper 2 heads, 64x64 stages {stages}{', q held' if hold_q else ''}"
                yield name, replace(base, hopper_forward=tile)
        for together in (1, 2, 4, 8):
            yield f"hopper, {together} heads together", replace(base, forward_together=together)
    plain = replace(base, hopper_forward=None)
    for rows, keys, warps, stages in ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)):
        tile = TileConfig(rows, keys, warps, stages)
        name = f"portable {rows}x{keys} warps {warps} stages {stages}"
        yield name, replace(plain, forward=tile)


def backward_candidates(base: LaunchConfig) -> Iterator[tuple[str, LaunchConfig]]:
    """Head interleaving of the fused kernel, tiles of the portable pair."""
    if base.hopper_backward is not None:
        for together in (1, 2, 4, 8):
            yield f"fused, {together} heads together", replace(base, backward_together=together)
    plain = replace(base, hopper_backward=None)
    for rows, keys, warps in ((64, 128, 8), (64, 64, 8), (32, 128, 8)):
        tile = TileConfig(rows, keys, warps, 2)
        yield f"portable dk/dv {rows}x{keys} warps {warps}", replace(plain, dkdv=tile)


def tune_few_rows() -> None:
    """Time the kernels for full attention of 512 tokens and 8 heads, inside a CUDA graph."""
    q, k, v = (torch.randn(1, 512, 8, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)
    problem = SinkWindowProblem(q, k, v, AttentionSpec(0, None, False, 64**-0.5))
    base = problem.launch_config()
    portable = replace(base, hopper_small=None)
    candidates = {
        f"portable 64x{keys} stages 3": replace(portable, forward=TileConfig(64, keys, 4, 3))
        for keys in (64, 128)
    }
    if base.hopper_small is not None:
        for keys, blocks in ((256, 1), (128, 2), (64, 4)):
            name = f"2 warpgroups, {blocks} blocks of {keys} keys each"
            candidates[name] = replace(base, hopper_small=TileConfig(64, keys, 4, blocks))
    for label, config in candidates.items():
        run = captured(lambda config=config: launch.forward(problem, out, None, config))
        print(f"few-rows {milliseconds(run, 60) / CALLS * 1e3:8.2f} us  {label}", flush=True)


def tune_parts(run: Callable[[], object], name: str) -> None:
    """Time the backward pass with ``dq`` accumulated in parts of several sizes."""
    selected = configurations.ACCUMULATOR_BYTES
    for mib in (4096, 1024, 512, 256):
        configurations.ACCUMULATOR_BYTES = mib << 20
        print(f"{name:14s} backward {milliseconds(run):8.2f} ms  dq in parts of {mib} MiB")
    configurations.ACCUMULATOR_BYTES = selected


def tune(name: str, head_dim: int, which: str) -> None:
    """Time every candidate of one shape."""
    tokens, num_sink, window = SHAPES[name]
    q, dout = (
        torch.randn(1, tokens, 32, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    k, v = (
        torch.randn(1, tokens, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(q)
    lse = torch.empty(1, 32, tokens, device="cuda")
    spec = AttentionSpec(num_sink, window, True, head_dim**-0.5)
    problem = SinkWindowProblem(q, k, v, spec)
    base = problem.launch_config()
    launch.forward(problem, out, lse, base)
    if which == "forward":
        runs = {
            label: lambda config=config: launch.forward(problem, out, lse, config)
            for label, config in forward_candidates(base)
        }
    else:
        runs = {
            label: lambda config=config: launch.backward(problem, out, lse, dout, None, config)
            for label, config in backward_candidates(base)
        }
        tune_parts(next(iter(runs.values())), name)
    times = {label: milliseconds(run) for label, run in runs.items()}
    for label, ms in sorted(times.items(), key=lambda item: item[1]):
        print(f"{name:14s} d{head_dim:<4d} {which:9s} {ms:8.2f} ms  {label}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--pass", dest="which", choices=PASSES, default="forward")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    options = parser.parse_args()
    if options.which == "few-rows":
        tune_few_rows()
        return
    for name in options.shape or SHAPES:
        tune(name, options.head_dim, options.which)


if __name__ == "__main__":
    main()

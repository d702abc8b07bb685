"""Offline sweep of the launch configuration of the NSA decode step.

    python benchmarks/tune_nsa_decode.py --out FOLDER

Every candidate's results are compared with the present configuration's before it is timed.  The
winner, the least sum of times over the shapes, each divided by the present one, goes into
``DecodeTiles`` of ``sparsek_kernels/nsa/paged/launch.py``; nothing is tuned at run time.  Steps are
timed in a CUDA graph that chains several of them over different pages, so that each reads cold
memory as the layers of a model do.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from sparsek_backend.bench.ops.nsa_decode import DEFAULTS, SPEC, Inputs, make_inputs  # noqa: E402
from sparsek_backend.bench.registry import Case  # noqa: E402
from sparsek_backend.bench.spec import parse_spec  # noqa: E402
from sparsek_kernels.nsa.paged import launch as launch_paged  # noqa: E402
from sparsek_kernels.nsa.paged.launch import DecodeTiles  # noqa: E402
from sparsek_kernels.nsa.paged.problem import PagedProblem  # noqa: E402

SHAPES = ((64, 4, "1q1s64k"), (32, 8, "1q1s64k"), (64, 4, "32q1s16k"), (32, 8, "32q1s16k"))
"""Query heads, KV heads and batch of each shape."""
COPIES = 4
CANDIDATES = {
    "cmp_rows": (32, 64, 128),
    "cmp_programs": (2, 4, 8, 16),
    "cmp_warps": (2, 4),
    "cmp_stages": (2, 3),
    "rows": (32, 64, 128),
    "programs": (2, 4, 8),
    "warps": (2, 4),
    "stages": (2, 3),
}


def graph_ms(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one of the calls, all of them captured in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def step(inputs: Inputs, out: torch.Tensor) -> None:
    """One step."""
    problem = PagedProblem(
        inputs.q, inputs.pages, inputs.batch, SPEC, inputs.compression, inputs.window_size,
        inputs.scale,
    )  # fmt: skip
    launch_paged.decode(problem, out)


def single_changes(start: DecodeTiles) -> list[DecodeTiles]:
    """Every change of one field."""
    return [
        replace(start, **{name: value})
        for name, values in CANDIDATES.items()
        for value in values
        if value != getattr(start, name)
    ]


def sweep(
    start: DecodeTiles, others: Sequence[DecodeTiles], shapes: Sequence[int], table: Any
) -> dict[DecodeTiles, list[float]]:
    """Times of each configuration over the times of ``start``, one for each shape."""
    ratios: dict[DecodeTiles, list[float]] = {tiles: [] for tiles in (start, *others)}
    for heads, kv_heads, spec in (SHAPES[index] for index in shapes):
        params = {**DEFAULTS, "num_heads": heads, "num_kv_heads": kv_heads}
        copies = [
            make_inputs(
                Case("tune", parse_spec(spec), {**params, "seed": seed}), torch.device("cuda")
            )
            for seed in range(COPIES)
        ]
        outs = [x.q.new_zeros(len(x.q), 3, *x.q.shape[1:]) for x in copies]
        calls = [partial(step, x, out) for x, out in zip(copies, outs, strict=True)]
        expected, present = outs[0], 1.0
        for tiles in ratios:
            launch_paged.TILES = tiles
            calls[0]()
            if tiles == start:
                expected = outs[0].clone()
            torch.testing.assert_close(outs[0], expected, rtol=2e-2, atol=2e-2)
            found = graph_ms(calls)
            present = found if tiles == start else present
            ratios[tiles].append(found / present)
            table.writerow([heads, kv_heads, spec, *astuple(tiles), f"{found:.5f}"])
        del copies, outs, calls
        torch.cuda.empty_cache()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=int, action="append", help="index; all when left out")
    arguments = parser.parse_args()
    shapes = arguments.shape or range(len(SHAPES))
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = best = launch_paged.TILES
    with (arguments.out / "nsa_decode_tuning.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["heads", "kv_heads", "spec", *(field.name for field in fields(start)), "ms"]
        )
        others = single_changes(start)
        ratios = sweep(start, others, shapes, table)
        for name in CANDIDATES:
            alone = [x for x in others if getattr(x, name) != getattr(start, name)]
            winner = min(alone, key=lambda tiles: sum(ratios[tiles]))
            if sum(ratios[winner]) < 0.99 * len(shapes):
                best = replace(best, **{name: getattr(winner, name)})
        if best != start and best not in ratios:
            ratios |= sweep(start, [best], shapes, table)
    for tiles, found in ratios.items():
        print(f"{sum(found) / len(found):.3f}", [f"{x:.3f}" for x in found], tiles)
    print("best", min(ratios, key=lambda tiles: sum(ratios[tiles])))


if __name__ == "__main__":
    main()

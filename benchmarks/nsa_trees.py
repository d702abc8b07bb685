"""Native sparse attention of two checkouts on one GPU: decode steps and forward passes, beside FA3.

    python benchmarks/nsa_trees.py OLD NEW --csv nsa_trees.csv
    python benchmarks/nsa_trees.py OLD NEW --only decode --commits 5f26083 0123abc

Each checkout runs in processes of its own, with its own kernels and its own benchmark operations.
All are run once side by side, to compile; then the checkouts take turns.  What differs from fp64 by
more than it may is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

DEVICE = "cuda"
PROVIDERS = ("sparsek", "fa3")
HEADS = ((64, 4), (32, 8))
DECODES = ("1q1s8k", "1q1s64k", "32q1s64k")
FORWARDS = ("8k", "64k")


def decode_rows(machine: Any, budget_ms: float) -> Iterator[Any]:
    """A decode step over pages, as ``sparsek bench`` checks and times it."""
    import torch

    from sparsek_backend.bench.ceilings import measure_ceilings
    from sparsek_backend.bench.ops.nsa_decode import OPS
    from sparsek_backend.bench.registry import Case
    from sparsek_backend.bench.runner import run_case
    from sparsek_backend.bench.spec import parse_spec

    [op] = OPS
    device = torch.device(DEVICE)
    limits = measure_ceilings(device, [torch.bfloat16])
    for heads, kv_heads in HEADS:
        for spec in DECODES:
            params = {**op.defaults, "num_heads": heads, "num_kv_heads": kv_heads}
            case = Case(f"{heads}x{kv_heads}", parse_spec(spec), params, providers=PROVIDERS)
            yield from run_case(op, case, device, machine, limits, budget_ms)


def forward_rows(machine: Any, budget_ms: float) -> Iterator[Any]:
    """A forward pass without gradients, called from Python and, at 8k, replayed from a graph.

    Where queries are correlated, neighbouring tokens select many of the same blocks.
    """
    import nsa
    import torch

    from sparsek_backend.bench.registry import Unavailable
    from sparsek_backend.bench.timing import make_timed, time_interleaved
    from sparsek_kernels import nsa_attention

    for (heads, kv_heads), kind in product(HEADS, ("random", "correlated")):
        tensors = nsa.inputs(heads, kv_heads, 1280, kind)
        with torch.no_grad():
            out, chosen = nsa_attention(*tensors, return_block_indices=True)
            exact = nsa_attention(*(x.double() for x in tensors), block_indices=chosen)
        error = float((out.double() - exact).norm() / exact.norm())
        detail = f"relative error {error:.1e}, bound 1e-2"
        for tokens in FORWARDS:
            one = nsa.Comparison("forward", f"{heads}x{kv_heads}:{tokens}", [], kind)
            row = dataclasses.replace(
                one.row("nsa_forward"), detail=detail, **dataclasses.asdict(machine)
            )
            if not error < 1e-2:
                yield dataclasses.replace(row, status="gate failed")
                continue
            inputs, timed = one.tensors, []
            for name in PROVIDERS if kind == "random" else PROVIDERS[:1]:
                try:
                    call = nsa.provider_call(one, name, inputs)
                except Unavailable as problem:
                    yield dataclasses.replace(
                        row, provider=name, status="unavailable", detail=str(problem)
                    )
                    continue
                for graph in (False, True) if tokens == "8k" else (False,):
                    made = make_timed(call, timing="cold", device=nsa.CUDA, graph=graph)
                    timed.append((name, made))
            calls, least = [x for _, x in timed], 5 if budget_ms > 1 else 1
            taken = time_interleaved(calls, device=nsa.CUDA, budget_ms=budget_ms, min_samples=least)
            for (name, _), t in zip(timed, taken, strict=True):
                yield dataclasses.replace(row, provider=name, **columns(t))
            del inputs, timed
            torch.cuda.empty_cache()


def columns(timing: Any) -> dict[str, Any]:
    """Columns of a row that hold its time."""
    spread = {"p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms, "samples": timing.samples}
    return {"ms": timing.median_ms, "method": timing.method, **spread}


ROWS = {"decode": decode_rows, "forward": forward_rows}


def work(family: str, commit: str, budget_ms: float) -> None:
    """Print a family's rows, a line of JSON each."""
    import torch

    from sparsek_backend.machine import describe_machine

    machine = describe_machine(torch.device(DEVICE), commit)
    for row in ROWS[family](machine, budget_ms):
        print(json.dumps(dataclasses.asdict(row)), flush=True)


def start(tree: Path, commit: str, family: str, budget_ms: float) -> subprocess.Popen[str]:
    """A process that runs a family of a checkout."""
    path = [str(tree), str(tree / "kernels"), str(tree / "benchmarks"), os.getenv("PYTHONPATH", "")]
    command = [sys.executable, __file__, str(tree), str(tree), "--work", family]
    command += ["--commits", commit, commit, "--budget-ms", str(budget_ms)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a process measured, until it ended or failed."""
    text, _ = process.communicate()
    if process.returncode:
        print(f"{process.args}: exit status {process.returncode}", file=sys.stderr)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def told(row: dict[str, Any]) -> str:
    """A row's time, or why it has none."""
    return f"{row['ms'] * 1e3:.1f}" if row["ms"] else str(row["status"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="old, new")
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS))
    parser.add_argument("--commits", nargs=2, default=("", ""), help="where there is no git")
    parser.add_argument("--compiled", action="store_true", help="they ran before: only time them")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--budget-ms", type=float, default=150, help="of a case's samples")
    parser.add_argument("--work", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.commits[0], args.budget_ms)
        return
    trees = [(x.resolve(), commit) for x, commit in zip(args.trees, args.commits, strict=True)]
    untimed = [] if args.compiled else args.only
    compiling = [start(*tree, family, 1) for tree in trees for family in untimed]
    for process in compiling:
        finish(process)
    found: list[list[dict[str, Any]]] = [[], []]
    for family in args.only:
        for rows, tree in zip(found, trees, strict=True):
            rows += finish(start(*tree, family, args.budget_ms))
    names = ("op", "case", "spec", "provider", "method")
    old, new = ({tuple(row[x] for x in names): row for row in rows} for rows in found)
    for key in {**old, **new}:
        times = [told(rows[key]) if key in rows else "failed" for rows in (old, new)]
        print(f"{', '.join(key):70} us: old {times[0]:>9} new {times[1]:>9}")
    if args.csv:
        sys.path[:0] = [str(trees[1][0]), str(trees[1][0] / "kernels")]
        from sparsek_backend.bench.results import Row, write_csv

        write_csv(args.csv, [Row(**row) for rows in found for row in rows])


if __name__ == "__main__":
    main()

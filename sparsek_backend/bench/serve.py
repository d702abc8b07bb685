"""`sparsek bench serve`: time to first token and per output token in vLLM, two backends."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.table import Table

from sparsek_backend.bench.plan import Plan, PlanFile, Row
from sparsek_backend.bench.report import verdict
from sparsek_backend.bench.serve_plot import plot_serve
from sparsek_backend.bench.timing import quantile
from sparsek_backend.command_line import whole_table
from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.machine import Machine

WORKER = "sparsek_backend.bench.serve_worker"


@dataclass(frozen=True)
class ServeCase:
    """Concurrent requests of one context length."""

    context: int
    requests: int


@dataclass(frozen=True, kw_only=True)
class ServePlan(Plan):
    """Model, cases and settings of a measurement of TTFT and TPOT."""

    cases: tuple[ServeCase, ...]  # contexts and concurrency
    output_tokens: int  # tokens generated per request
    repeats: int  # samples per case and round
    rounds: int  # engines are started in turn, this often; the order alternates

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_tokens < 2:
            raise ValueError(f"output_tokens: expected at least 2, got {self.output_tokens}")


def parse_cases(contexts: Sequence[int], requests: Sequence[int]) -> tuple[ServeCase, ...]:
    """Cross contexts with concurrencies.

    Raises:
        ValueError: fewer than one request.
    """
    if wrong := [count for count in requests if count < 1]:
        raise ValueError(f"requests: expected a positive integer, got {wrong[0]}")
    return tuple(ServeCase(*x) for x in product(contexts, requests))


class ServeFile(PlanFile):
    """What `sparsek bench serve` keeps: a line for each case of a backend in a round."""

    command = "serve"

    def read(self) -> dict[tuple[str, int, ServeCase], Row]:
        """The lines by backend, round and case."""
        return {
            (line["backend"], line["round"], ServeCase(line["context"], line["requests"])): line
            for line in self.lines()
        }


def run_serve(
    plan: ServePlan, machine: Machine, path: Path, on_progress: Callable[[str], None]
) -> list[Row]:
    """Rows of both backends, measured in turn where the file at ``path`` lacks them.

    Raises:
        ValueError: a file of another plan.
        WorkerError: an engine failed; the message names the backend.
    """
    kept = asdict(plan)
    cases, _ = kept.pop("cases"), kept.pop("rounds")
    file = ServeFile(path, kept, asdict(machine))
    for turn in range(plan.rounds):
        for name in plan.backends if turn % 2 == 0 else plan.backends[::-1]:
            label, found = f"{name}, round {turn + 1}", file.read()
            left = [asdict(case) for case in plan.cases if (name, turn, case) not in found]
            if not left:
                there = f"{file.machine['gpu']}, commit {file.machine['commit'] or 'unknown'}"
                on_progress(f"{label}: {path} has it ({there}); another --name measures anew")
                continue
            file.check_machine()
            own = {"backend": name, "round": turn, "seed": plan.seed + turn}
            job = {**kept, **own, "path": str(path.resolve()), "cases": cases, "left": left}
            plan.run(WORKER, job, backend=name, label=label, on_progress=on_progress)
    found = file.read()
    return [
        _row(plan, file.machine, name, [found[name, turn, case] for turn in range(plan.rounds)])
        for case, name in product(plan.cases, plan.backends)
    ]


def _row(plan: ServePlan, machine: Row, name: str, rounds: list[Row]) -> Row:
    """One backend on one case; times in milliseconds."""
    row: Row = {
        "backend": name,
        "model": Path(plan.model).name,
        "context": rounds[0]["context"],
        "requests": rounds[0]["requests"],
    }
    for kind in ("ttft", "tpot"):
        times = sorted(1e3 * t for one in rounds for t in one[f"{kind}_s"])
        row[f"{kind}_ms"] = statistics.median(times)
        row[f"{kind}_p20_ms"] = quantile(times, 0.2)
        row[f"{kind}_p80_ms"] = quantile(times, 0.8)
    return {
        **row,
        "samples": sum(len(one["ttft_s"]) for one in rounds),
        "attended_share": rounds[0]["attended_share"],
        "kv_cache_tokens": rounds[0]["kv_cache_tokens"],
        "settings": plan.settings_of(name),
        **machine,
    }


def write_results(out: Path, name: str, rows: Sequence[Row]) -> list[Path]:
    """Write NAME.csv, NAME.json and, with matplotlib, NAME.png; returns their paths."""
    table = write_csv_file(out / f"{name}.csv", rows, digits=5)
    full, drawn = out / f"{name}.json", out / f"{name}.png"
    full.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    try:
        plot_serve(rows, drawn)
    except ImportError:
        return [table, full]
    return [table, full, drawn]


def serve_table(rows: Sequence[Row]) -> Table:
    """A table of both backends side by side, with gains and losses."""
    names = ("case", "backend", "TTFT ms", "p20-p80", "TPOT ms", "p20-p80", "TTFT", "TPOT")
    table = whole_table(*names, title="end to end in vLLM")
    base: dict[tuple[int, int], Row] = {}
    for row in rows:
        first = base.setdefault((row["context"], row["requests"]), row)
        cells, gains = [], []
        for kind in ("ttft", "tpot"):
            cells.append(f"{row[f'{kind}_ms']:.4g}")
            cells.append(f"{row[f'{kind}_p20_ms']:.4g}-{row[f'{kind}_p80_ms']:.4g}")
            ratio = first[f"{kind}_ms"] / row[f"{kind}_ms"]
            gains.append("" if first is row else verdict(ratio))
        table.add_row(f"{row['requests']} x {row['context']}", row["backend"], *cells, *gains)
    return table

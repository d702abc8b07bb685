"""`sparsek bench load`: goodput of two backends under a server's load, each at its best rate.

`vllm bench serve` cannot send a turn after the answer before it, and keeps nothing of a run that
is interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sparsek_backend.bench.load_results import LoadFile, load_rows, next_rate
from sparsek_backend.bench.loads import LOADS, Limits, describe_sessions, draw_sessions
from sparsek_backend.bench.plan import Plan, Row
from sparsek_backend.command_line import whole_table
from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.machine import Machine

WORKER = "sparsek_backend.bench.load_worker"


@dataclass(frozen=True, kw_only=True)
class LoadPlan(Plan):
    """Model, load and settings of a measurement of goodput."""

    load: str  # a name of `LOADS`
    scale: float  # share of its prompts' tokens and times to think
    rates: tuple[float, ...]  # sessions a second
    requests: int  # turns at each rate
    budget: float  # seconds after which a rate is cut off
    limits: Limits  # of good answers
    only: str | None = None  # name of the one backend that is measured; None measures both

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only not in (None, *self.backends):
            names = " or ".join(self.backends)
            raise ValueError(f"only: expected {names}, got {self.only!r}")
        if not self.rates or not all(rate > 0 for rate in self.rates):
            raise ValueError(f"rate: expected positive numbers, got {self.rates}")
        if self.budget <= 0:
            raise ValueError(f"budget_seconds: expected a positive number, got {self.budget}")

    def describe(self) -> dict[str, Any]:
        """Statistics of the sessions that are sent."""
        load = LOADS[self.load].scaled(self.scale)
        return describe_sessions(draw_sessions(load, self.requests, self.seed))


def run_load(
    plan: LoadPlan, machine: Machine, path: Path, on_progress: Callable[[str], None]
) -> list[Row]:
    """Rows of both backends at each rate, after those that the file at ``path`` lacks are measured.

    Raises:
        ValueError: a file of another plan.
        WorkerError: an engine failed; the message names the backend.
    """
    kept = asdict(plan)
    free = {name: kept.pop(name) for name in ("rates", "limits", "budget", "only")}
    here = asdict(machine)
    file = LoadFile(path, kept, here)
    for name in (plan.only,) if plan.only else plan.backends:
        if next_rate(file.read(), name, plan.rates, plan.limits) is not None:
            file.check_machine()
            own = {"backend": name, "path": str(path.resolve()), "plan": kept, "machine": here}
            job = {**kept, **free, **own}
            plan.run(WORKER, job, backend=name, label=name, on_progress=on_progress)
    return [
        {
            "model": Path(plan.model).name,
            "load": plan.load,
            **row,
            "settings": plan.settings_of(row["backend"]),
            **file.machine,
        }
        for row in load_rows(file.read(), plan.backends, plan.limits)
    ]


def write_load(out: Path, name: str, plan: LoadPlan, rows: Sequence[Row]) -> list[Path]:
    """Write NAME.csv, a line for each rate and backend, and NAME.json, the load beside it."""
    table = write_csv_file(out / f"{name}.csv", rows, digits=5)
    full = out / f"{name}.json"
    found = {
        "load": plan.describe(),
        "limits": asdict(plan.limits),
        "best": {row["backend"]: row for row in rows if row["best"]},
        "rates": rows,
    }
    full.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return [table, full]


def sessions_table(plan: LoadPlan) -> Table:
    """The statistics of the sessions that are sent."""
    found = plan.describe()
    title = (
        f"{plan.load}: {found['requests']} requests in {found['sessions']} sessions\n"
        f"an ideal prefix cache has {found['ideal_hit_share']:.1%} of the prompts' tokens"
    )
    spreads = {name: value for name, value in found.items() if isinstance(value, dict)}
    columns = list(spreads["prompt_tokens"])
    table = whole_table("", *columns, title=title)
    for name, spread in spreads.items():
        table.add_row(name, *(f"{spread[column]:.4g}" for column in columns))
    return table


def load_table(plan: LoadPlan, rows: Sequence[Row]) -> Table:
    """Both backends at each rate, and what each does at its best over the first's best."""
    limits = plan.limits
    title = (
        f"{plan.load}: a good answer begins within {limits.first:g} s, in later turns "
        f"{limits.later:g} s,\nand takes at most {1e3 * limits.per_token:g} ms a token"
    )
    heads = ("rate", "backend", "sent", "done/s", "good/s", "best", "first s", "token ms", "cached")
    table = whole_table(*heads, title=title)
    for row in rows:
        table.add_row(
            f"{row['rate']:g}",
            row["backend"],
            str(row["requests"]),
            f"{row['throughput']:.3g}",
            f"{row['goodput']:.3g}",
            "" if not row["best"] else "-" if row["gain"] is None else f"{row['gain']:.2f}x",
            _times(row, "ttft", 1e-3),
            _times(row, "tpot", 1.0),
            f"{row['hit_share']:.0%} of {row['ideal_hit_share']:.0%}",
        )
    table.caption = "first s, token ms: p50 and p99; cached: of prompts, and by an ideal cache"
    return table


def _times(row: Row, kind: str, unit: float) -> str:
    """Two percentiles of one kind, or a dash without answers."""
    found = [row[f"{kind}_{name}_ms"] for name in ("p50", "p99")]
    return "-" if None in found else " ".join(f"{unit * time:.3g}" for time in found)


def open_ends(rows: Sequence[Row]) -> list[str]:
    """What to say of backends whose best rate is the highest that was measured."""
    highest: dict[str, Row] = {row["backend"]: row for row in rows}
    return [
        f"{name} does most at {row['rate']:g}, the highest rate of it that was measured: a higher "
        "--rate may show more"
        for name, row in highest.items()
        if row["best"]
    ]

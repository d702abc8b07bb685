"""`sparsek bench serve`: time to first token and per output token in vLLM, two backends."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sparsek_backend.bench.load import LoadRow
from sparsek_backend.bench.report import verdict
from sparsek_backend.bench.serve_plot import plot_serve
from sparsek_backend.bench.shapes import model_folder
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.timing import quantile
from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.eval.workers import run_worker
from sparsek_backend.machine import Machine
from sparsek_backend.vllm_backend.names import BACKEND_NAME

WORKER = "sparsek_backend.bench.serve_worker"
SILENCE_LIMIT = 1800.0
"""Seconds that a worker may stay silent before it counts as hung."""


@dataclass(frozen=True)
class ServeCase:
    """Concurrent requests of one context length."""

    context: int
    requests: int


@dataclass(frozen=True)
class ServePlan:
    """Model, cases and settings of a measurement of TTFT and TPOT.

    Args:
        model: model folder or name, or a name of `SHAPES`.
        cases: contexts and concurrency.
        settings: our `sparsek` settings; empty for the defaults.
        baseline: vLLM backend to compare with, None for vLLM's own choice.
        output_tokens: tokens generated per request.
        repeats: samples per case and round.
        rounds: engines are started in turn, this often; the order alternates.
        engine: further arguments of `vllm.LLM`.
        seed: of the prompts.
    """

    model: str
    cases: tuple[ServeCase, ...]
    settings: Mapping[str, Any]
    baseline: str | None
    output_tokens: int
    repeats: int
    rounds: int
    engine: Mapping[str, Any]
    seed: int = 0


@dataclass(frozen=True)
class ServeRow:
    """One backend on one case; times in milliseconds."""

    backend: str
    model: str
    context: int
    requests: int
    ttft_ms: float
    ttft_p20_ms: float
    ttft_p80_ms: float
    tpot_ms: float
    tpot_p20_ms: float
    tpot_p80_ms: float
    samples: int
    attended_share: float
    kv_cache_tokens: int
    settings: str
    machine: Machine


def parse_cases(contexts: Sequence[str], requests: Sequence[int]) -> tuple[ServeCase, ...]:
    """Cross contexts (`2k`, `128k`) with concurrencies.

    Raises:
        ValueError: a context that is no size, or fewer than one request.
    """
    cases = []
    for text in contexts:
        length = parse_size("context", text)
        for count in requests:
            if count < 1:
                raise ValueError(f"requests: expected a positive integer, got {count}")
            cases.append(ServeCase(length, count))
    return tuple(cases)


def parse_size(name: str, text: str) -> int:
    """Return a number of tokens: `8k` is 8192.

    Raises:
        ValueError: no size; the message has the argument's ``name``.
    """
    try:
        return parse_spec(f"q{text}").seq_lens[0]
    except ValueError as error:
        raise ValueError(f"{name}: expected a size such as 8k, got {text!r}") from error


def run_serve(
    plan: ServePlan, machine: Machine, on_progress: Callable[[str], None]
) -> list[ServeRow]:
    """Measure both backends in turn, each in processes of its own.

    Raises:
        ValueError: unknown model.
        WorkerError: an engine failed; the message names the backend.
    """
    if plan.output_tokens < 2:
        raise ValueError(f"output_tokens: expected at least 2, got {plan.output_tokens}")
    names = (plan.baseline or "vLLM's own", BACKEND_NAME)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="sparsek-shape-") as folder:
        model, loading = model_folder(plan.model, Path(folder))
        for turn in range(plan.rounds):
            for name in names if turn % 2 == 0 else names[::-1]:
                ours = name == BACKEND_NAME
                job = {
                    "model": str(model),
                    "settings": dict(plan.settings) if ours else None,
                    "baseline": None if ours else plan.baseline,
                    "cases": [asdict(case) for case in plan.cases],
                    "output_tokens": plan.output_tokens,
                    "repeats": plan.repeats,
                    "engine": {**plan.engine, **loading},
                    "seed": plan.seed + turn,
                }
                label = f"{name}, round {turn + 1}"
                on_progress(f"{label}: starting the engine")
                tell = functools.partial(_tell, on_progress, label)
                one = run_worker(WORKER, job, label=label, on_progress=tell, timeout=SILENCE_LIMIT)
                found[name].append(one)
    return [
        _row(plan, machine, name, index, found[name])
        for index in range(len(plan.cases))
        for name in names
    ]


def _tell(on_progress: Callable[[str], None], label: str, line: str) -> None:
    on_progress(f"{label}: {line}")


def _row(
    plan: ServePlan, machine: Machine, name: str, index: int, rounds: list[dict[str, Any]]
) -> ServeRow:
    case = plan.cases[index]
    ttft = sorted(1e3 * t for one in rounds for t in one["cases"][index]["ttft_s"])
    tpot = sorted(1e3 * t for one in rounds for t in one["cases"][index]["tpot_s"])
    settings = " ".join(f"{key}={value}" for key, value in plan.settings.items())
    return ServeRow(
        backend=name,
        model=Path(plan.model).name,
        context=case.context,
        requests=case.requests,
        ttft_ms=statistics.median(ttft),
        ttft_p20_ms=quantile(ttft, 0.2),
        ttft_p80_ms=quantile(ttft, 0.8),
        tpot_ms=statistics.median(tpot),
        tpot_p20_ms=quantile(tpot, 0.2),
        tpot_p80_ms=quantile(tpot, 0.8),
        samples=len(ttft),
        attended_share=rounds[0]["attended_share"],
        kv_cache_tokens=rounds[0]["kv_cache_tokens"],
        settings=(settings or "defaults") if name == BACKEND_NAME else "",
        machine=machine,
    )


Draw = Callable[[Sequence[Mapping[str, Any]], Path], None]


def write_results(
    out: Path, name: str, rows: Sequence[ServeRow | LoadRow], draw: Draw = plot_serve
) -> list[Path]:
    """Write NAME.csv, NAME.json and, with matplotlib, NAME.png; returns their paths."""
    records = [_record(row) for row in rows]
    table = write_csv_file(out / f"{name}.csv", list(records[0]), records, digits=5)
    full = out / f"{name}.json"
    full.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    try:
        draw(records, drawn := out / f"{name}.png")
    except ImportError:
        return [table, full]
    return [table, full, drawn]


def _record(row: ServeRow | LoadRow) -> dict[str, Any]:
    """A row's values by column, those of its machine last."""
    values = asdict(row)
    machine: dict[str, Any] = values.pop("machine")
    return values | machine


def serve_table(rows: Sequence[ServeRow]) -> Table:
    """A table of both backends side by side, with gains and losses."""
    names = ("case", "backend", "TTFT ms", "p20-p80", "TPOT ms", "p20-p80", "TTFT", "TPOT")
    table = Table(*names, title="end to end in vLLM", title_justify="left")
    base: dict[tuple[int, int], ServeRow] = {}
    for row in rows:
        case = (row.context, row.requests)
        reference = base.setdefault(case, row)
        gains = ["", ""]
        if reference is not row:
            gains = [
                verdict(reference.ttft_ms / row.ttft_ms),
                verdict(reference.tpot_ms / row.tpot_ms),
            ]
        table.add_row(
            f"{row.requests} x {row.context}",
            row.backend,
            f"{row.ttft_ms:.4g}",
            f"{row.ttft_p20_ms:.4g}-{row.ttft_p80_ms:.4g}",
            f"{row.tpot_ms:.4g}",
            f"{row.tpot_p20_ms:.4g}-{row.tpot_p80_ms:.4g}",
            *gains,
        )
    return table

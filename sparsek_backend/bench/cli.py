"""`sparsek bench`: kernels, serving, comparisons and plots."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sparsek_backend.bench.ceilings import measure_ceilings
from sparsek_backend.bench.compare import compare_rows
from sparsek_backend.bench.load import (
    LoadPlan,
    load_table,
    open_ends,
    run_load,
    sessions_table,
    write_load,
)
from sparsek_backend.bench.loads import LOADS
from sparsek_backend.bench.ops import OPS
from sparsek_backend.bench.plots import plot_csv
from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.report import print_bars, print_case, print_comparison
from sparsek_backend.bench.results import Row, read_csv, write_csv
from sparsek_backend.bench.runner import check_bars, run_case
from sparsek_backend.bench.serve import (
    ServePlan,
    parse_cases,
    run_serve,
    serve_table,
    write_results,
)
from sparsek_backend.bench.shapes import SHAPES
from sparsek_backend.bench.workload import load_workloads
from sparsek_backend.command_line import commands, fail, failing_on, grouped, token_option
from sparsek_backend.config import resolve_config
from sparsek_backend.eval.options import EngineOptions
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.vllm_backend.names import BACKEND_NAME

app = commands("Benchmarks: kernels, serving, comparisons.")
console = Console(width=None)

_COMMIT = typer.Option(help="Commit to record where there is no git.")


@app.command("list")
def list_ops() -> None:
    """List what `bench kernels` times, with its parameters."""
    for op in OPS.values():
        console.print(f"[bold]{op.name}[/bold]: {op.summary}")
        console.print("  " + " ".join(f"{k}={v}" for k, v in op.defaults.items()))


@app.command()
def kernels(
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plots.")],
    yaml: Annotated[
        list[Path] | None,
        typer.Option(
            help="Workload file. Repeatable; by default every file in benchmarks/ for this device."
        ),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this workload. Repeatable.")] = None,
    device: Annotated[
        str, typer.Option(help="cuda or cpu; auto takes CUDA if it is there.")
    ] = "auto",
    budget_ms: Annotated[
        float, typer.Option(help="Milliseconds for the samples of one case.")
    ] = 400.0,
    commit: Annotated[str, _COMMIT] = "",
    name: Annotated[str, typer.Option(help="Stem of the result files.")] = "kernels",
    check: Annotated[bool, typer.Option(help="Exit with 1 when a bar is missed, too.")] = False,
) -> None:
    """Check and time kernels, beside other implementations.

    A kernel is timed once its results are right. Exits with 1 when one of ours is wrong.
    """
    with failing_on(ValueError, ImportError, OSError):
        out.mkdir(parents=True, exist_ok=True)
        where = choose_device(device)
        files = yaml or _default_yaml(where.type)
        found = [pair for path in files for pair in load_workloads(path)]
        chosen = [(op, one) for op, one in found if not case or one.name in case]
        if not chosen:
            raise ValueError(f"case: no workload of {', '.join(map(str, files))} has such a name")
        machine = describe_machine(where, commit)
        dtypes = list(dict.fromkeys(c.dtype() for _, c in chosen))
        ceilings = measure_ceilings(where, dtypes)
    console.print(
        f"{machine.gpu}: copy {ceilings.copy_tb_s:.3g} TB/s, read {ceilings.read_tb_s:.3g} TB/s, "
        + ", ".join(f"{k} matmul {v:.4g} TFLOP/s" for k, v in ceilings.matmul_tflops.items())
    )
    if where.type == "cpu":
        console.print("On a CPU these ceilings, and so shares of the roofline, are mostly noise.")
    path = out / f"{name}.csv"
    rows: list[Row] = []
    for number, (bench_op, one) in enumerate(chosen, 1):
        label = f"case {number} of {len(chosen)}: {bench_op.name} {one.name} {one.spec.text}"
        console.print(label, style="dim", highlight=False)
        try:
            new = run_case(bench_op, one, where, machine, ceilings, budget_ms)
            rows += new
            write_csv(path, rows)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise fail(f"{bench_op.name} {one.name}: {error}") from error
        print_case(console, new)
    results = check_bars(chosen, rows)
    print_bars(console, results)
    typer.echo(f"wrote {path}")
    try:
        for png in plot_csv(path, out):
            typer.echo(f"wrote {png}")
    except (ImportError, OSError) as error:
        console.print(f"no plots: {error}", markup=False)
    broken = [
        row for row in rows if row.provider == OURS and row.status in ("gate failed", "error")
    ]
    for row in broken:
        console.print(f"[red]{row.status}[/red] {' '.join(row.key)}: {escape(row.detail)}")
    if broken or (check and not all(result.met for result in results)):
        raise typer.Exit(1)


@dataclass(frozen=True)
class BackendOptions:
    model: Annotated[
        str, typer.Option(help=f"Model folder, or a shape without weights: {', '.join(SHAPES)}.")
    ]
    sparsek: Annotated[
        str, typer.Option(help="SPARSEK's settings as JSON; {} for its defaults.")
    ] = "{}"
    baseline: Annotated[
        str | None,
        typer.Option(help="vLLM backend to compare with; vLLM's own choice if left out."),
    ] = None

    def parsed(self) -> dict[str, Any]:
        """The same fields of a plan, checked before any engine starts."""
        if self.baseline is not None and self.baseline.upper() == BACKEND_NAME:
            raise ValueError(f"baseline: expected another backend than ours, got {self.baseline!r}")
        try:
            settings = json.loads(self.sparsek)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"sparsek: expected a JSON object, got {self.sparsek!r}: {error}"
            ) from error
        if not isinstance(settings, dict):
            raise ValueError(f"sparsek: expected a JSON object, got {self.sparsek!r}")
        resolve_config(settings, {}, source="--sparsek")
        return {"model": self.model, "settings": settings, "baseline": self.baseline}


@dataclass(frozen=True)
class CaseOptions:
    """Requests of `serve`, which start together."""

    context: Annotated[
        list[int] | None,
        token_option(
            "Prompt tokens, such as 32k. Repeatable; 2k if none. SPARSEK attends up to 8k whole, "
            "unless --sparsek sets dense_below."
        ),
    ] = None
    requests: Annotated[
        list[int] | None, typer.Option(help="Requests that decode together. Repeatable; 1 if none.")
    ] = None
    output_tokens: Annotated[int, typer.Option(help="Tokens generated per request.")] = 64
    repeats: Annotated[int, typer.Option(min=1, help="Samples per case and round.")] = 3
    rounds: Annotated[int, typer.Option(min=1, help="Engines of each backend, in turn.")] = 1


@app.command()
@grouped
def serve(
    backends: BackendOptions,
    out: Annotated[Path, typer.Option(help="Folder for JSON lines, CSV, JSON and plot.")],
    engine: EngineOptions,
    cases: CaseOptions,
    name: Annotated[
        str, typer.Option(help="Stem of the result files. Those of one that was cut off go on.")
    ] = "serve",
    commit: Annotated[str, _COMMIT] = "",
) -> None:
    """Time first and later tokens in vLLM, its own backend and SPARSEK.

    TTFT is the time to the first token of one prompt, TPOT the time per token while all requests
    decode. Each backend runs in processes of its own.
    """
    with failing_on(ValueError, ImportError, RuntimeError, OSError):
        out.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = asdict(cases)
        wanted = parse_cases(options.pop("context") or [2048], options.pop("requests") or [1])
        plan = ServePlan(cases=wanted, engine=engine.arguments(), **options, **backends.parsed())
        machine = describe_machine(choose_device(), commit)
        rows = run_serve(plan, machine, out / f"{name}.jsonl", _say)
        console.print(serve_table(rows))
        for path in write_results(out, name, rows):
            typer.echo(f"wrote {path}")


@dataclass(frozen=True)
class LoadOptions:
    """What `load` sends, and which answers are good."""

    load: Annotated[str, typer.Option(help=f"What arrives: one of {', '.join(LOADS)}.")] = (
        "documents-32k"
    )
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests at each rate; the load's own if left out.")
    ] = None
    budget_seconds: Annotated[
        float,
        typer.Option(
            help="A rate is cut off after this; what is under way then is no good answer."
        ),
    ] = 180.0
    scale: Annotated[
        float, typer.Option(help="Share of the prompts' tokens and times to think.")
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = 0
    first_limit: Annotated[
        float | None,
        typer.Option(help="Seconds to the first token of a session; the load's own if left out."),
    ] = None
    later_limit: Annotated[
        float | None, typer.Option(help="The same for a session's later turns.")
    ] = None
    token_limit: Annotated[
        float | None, typer.Option(help="Seconds per token behind the first, on average.")
    ] = None
    only: Annotated[
        str | None,
        typer.Option(help="Measure this backend alone: SPARSEK, or the baseline's name."),
    ] = None

    def plan(self, **others: Any) -> LoadPlan:
        if self.load not in LOADS:
            raise ValueError(f"load: expected one of {', '.join(LOADS)}, got {self.load!r}")
        load = LOADS[self.load]
        given = {
            "first": self.first_limit,
            "later": self.later_limit,
            "per_token": self.token_limit,
        }
        set_here = {name: value for name, value in given.items() if value is not None}
        return LoadPlan(
            load=self.load,
            scale=self.scale,
            requests=load.requests if self.requests is None else self.requests,
            budget=self.budget_seconds,
            limits=replace(load.limits, **set_here),
            seed=self.seed,
            only=self.only,
            **others,
        )


@app.command()
@grouped
def load(
    backends: BackendOptions,
    out: Annotated[Path, typer.Option(help="Folder for JSON lines, CSV and JSON.")],
    rate: Annotated[list[float], typer.Option(help="Sessions that begin in a second. Repeatable.")],
    engine: EngineOptions,
    options: LoadOptions,
    name: Annotated[
        str, typer.Option(help="Stem of the result files. Those of one that was cut off go on.")
    ] = "load",
    commit: Annotated[str, _COMMIT] = "",
) -> None:
    """Count good answers a second under load, of both backends.

    Goodput is the answers a second that keep to the limits. vLLM's own backend and SPARSEK get the
    same requests, and each is judged at its best rate.
    """
    with failing_on(ValueError, ImportError, RuntimeError, OSError):
        plan = options.plan(rates=tuple(rate), engine=engine.arguments(), **backends.parsed())
        console.print(sessions_table(plan))
        machine = describe_machine(choose_device(), commit)
        rows = run_load(plan, machine, out / f"{name}.jsonl", _say)
        console.print(load_table(plan, rows))
        for line in open_ends(rows):
            console.print(line, highlight=False)
        for path in write_load(out, name, plan, rows):
            typer.echo(f"wrote {path}")


def _say(line: str) -> None:
    console.print(f"[dim]{escape(line)}[/dim]", highlight=False)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Baseline CSV.")],
    b: Annotated[Path, typer.Argument(help="CSV to judge.")],
    tolerance: Annotated[float, typer.Option(help="Slower by more than this share fails.")] = 0.05,
) -> None:
    """Compare our rows of two result files.

    Exits with 1 where one is slower by more than --tolerance.
    """
    with failing_on(ValueError, OSError):
        pairs = compare_rows(read_csv(a), read_csv(b), tolerance)
    print_comparison(console, pairs)
    if regressions := sum(pair.regressed for pair in pairs):
        console.print(f"[red]{regressions} regressed[/red]")
        raise typer.Exit(1)


@app.command()
def plot(
    csv: Annotated[Path, typer.Argument(help="Result CSV.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNGs.")],
) -> None:
    """Draw the plots of a result file again."""
    with failing_on(ValueError, ImportError, OSError):
        for png in plot_csv(csv, out):
            typer.echo(f"wrote {png}")


def _default_yaml(device: str) -> list[Path]:
    """The workloads beside this installation that are of a size for the device."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    every, is_cpu = sorted(folder.glob("*.yaml")), device == "cpu"
    files = [file for file in every if file.stem.endswith("_cpu") == is_cpu]
    if not files:
        raise ValueError("yaml: expected --yaml FILE, no workloads lie beside this installation")
    return files

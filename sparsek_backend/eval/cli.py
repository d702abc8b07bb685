"""`sparsek eval`: dense against sparse at several budgets, on a local or a served model."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparsek_backend.eval.budgets import DEFAULT_BUDGETS, Budget, parse_budgets
from sparsek_backend.eval.job import Job
from sparsek_backend.eval.plot import plot_results
from sparsek_backend.eval.results import BudgetResult, summary_table, write_results
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.tasks import read_texts
from sparsek_backend.eval.worker import score
from sparsek_backend.eval.workers import run_worker
from sparsek_backend.pyplot import import_pyplot

app = typer.Typer(help="Quality: what is lost by attending less.")
console = Console()

WORKER = "sparsek_backend.eval.worker"
SILENCE_LIMIT = 1800.0
"""Seconds that a worker may stay silent before it counts as hung."""


@app.command()
def evaluate(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or name; by default SmolLM2-135M-Instruct is prepared."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="block_topk:16, sink_window, sink_window:1024, window (no sinks), with settings: "
            "block_topk:16,query_tile=1. Repeatable; dense always runs."
        ),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Score running servers instead: [LABEL=]http://host:port/v1. Repeatable; the "
            "first is the reference."
        ),
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="Model name at the servers.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for CSV, JSON and PNG.")] = Path("eval-results"),
    name: Annotated[str, typer.Option(help="Stem of the result files.")] = "quality",
    texts: Annotated[int, typer.Option(min=0, help="Texts for perplexity; 0 skips it.")] = 4,
    length: Annotated[int, typer.Option(min=128, help="Tokens of each text.")] = 4096,
    texts_folder: Annotated[
        Path | None, typer.Option(help="Folder of .txt files; by default speeches are fetched.")
    ] = None,
    passkey: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens of passkey probes; repeatable.")
    ] = None,
    no_passkey: Annotated[bool, typer.Option(help="Skip the passkey probes.")] = False,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the key is hidden, 0 to 1; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the local engine.")] = "auto",
    gpu_memory: Annotated[
        float | None, typer.Option(help="gpu_memory_utilization of the local engine.")
    ] = None,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="Size of the local engine's KV cache, on a GPU that others use too."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the passkeys and their filler.")] = 0,
    commit: Annotated[str, typer.Option(help="Commit to record where there is no git.")] = "",
) -> None:
    """Perplexity and passkey retrieval, dense against sparse: a table, CSV, JSON and a plot."""
    try:
        budgets = parse_budgets(list(budget or DEFAULT_BUDGETS))
        job = Job(
            texts_folder=str(_texts(texts_folder)),
            num_texts=texts,
            length=length,
            passkey_lengths=() if no_passkey else tuple(passkey or (length,)),
            passkey_depths=tuple(depth or (0.1, 0.35, 0.6, 0.85)),
            seed=seed,
        )
        _check_job(job)
        if base_url:
            if model or budget:
                raise ValueError(
                    "base-url: a server has its own model and budget; drop --model and --budget"
                )
            if dtype != "auto" or gpu_memory is not None or kv_cache_gib is not None:
                raise ValueError(
                    "base-url: a server's engine runs already; drop --dtype, --gpu-memory and "
                    "--kv-cache-gib"
                )
        elif served_model:
            raise ValueError("served-model: expected with --base-url only; use --model")
        import_pyplot()  # what the end needs is missed at the start
        out.mkdir(parents=True, exist_ok=True)
        if base_url:
            results = _run_servers(base_url, served_model, job)
            what = ", ".join(base_url)
        else:
            what = model or str(_default_model())
            engine: dict[str, Any] = {}
            if gpu_memory is not None:
                engine["gpu_memory_utilization"] = gpu_memory
            if kv_cache_gib is not None:
                engine["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
            results = _run_local(what, budgets, job, dtype, engine)
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        Console(stderr=True).print(f"[red]error[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from error
    console.print(summary_table(results))
    details = {
        "model": Path(what).name if Path(what).is_dir() else what,
        "date": datetime.date.today().isoformat(),
        "dtype": dtype,
        "job": asdict(job) | {"texts_folder": Path(job.texts_folder).name},
        "machine": _machine(commit),
    }
    written = write_results(out, name, results, details)
    title = f"{details['model']}, {job.num_texts} texts of {job.length} tokens"
    written.append(plot_results(results, out / f"{name}.png", title))
    for path in written:
        console.print(f"wrote {path}")


def run_budget(
    model: str,
    budget: Budget,
    job: Job,
    *,
    dtype: str = "auto",
    engine: dict[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BudgetResult:
    """Score one budget in a process of its own.

    Raises:
        WorkerError: the engine failed; the message begins with the budget.
    """
    settings = None if budget.settings is None else dict(budget.settings)
    data = {
        "model": model,
        "settings": settings,
        "job": asdict(job),
        "dtype": dtype,
        "engine": engine or {},
    }
    scores = run_worker(
        WORKER,
        data,
        label=f"budget {budget.label!r}",
        on_progress=on_progress,
        timeout=SILENCE_LIMIT,
    )
    share = budget.attended_share(job.length if job.num_texts else max(job.passkey_lengths))
    return BudgetResult.from_json(
        {"label": budget.label, "settings": settings, "attended_share": share, **scores}
    )


def _run_local(
    model: str, budgets: list[Budget], job: Job, dtype: str, engine: dict[str, Any]
) -> list[BudgetResult]:
    results = []
    with _progress() as progress:
        total = progress.add_task("budgets", total=len(budgets) * (job.steps() + 1))
        for one in budgets:

            def advance(message: str, label: str = one.label) -> None:
                progress.update(total, advance=1, description=f"{label}: {message}")

            progress.update(total, description=f"{one.label}: starting the engine")
            result = run_budget(model, one, job, dtype=dtype, engine=engine, on_progress=advance)
            results.append(result)
    return results


def _run_servers(urls: list[str], model: str | None, job: Job) -> list[BudgetResult]:
    results = []
    with _progress() as progress:
        total = progress.add_task("servers", total=len(urls) * job.steps())
        for text in urls:
            label, separator, url = text.partition("=")
            if not separator or "/" in label:
                label, url = text, text

            def advance(message: str, label: str = label) -> None:
                progress.update(total, advance=1, description=f"{label}: {message}")

            scorer = ServedScorer(url, model)
            scores = score(scorer, job, advance)
            results.append(
                BudgetResult.from_json(
                    {"label": label, "settings": None, "attended_share": None, **scores}
                )
            )
    return results


def _check_job(job: Job) -> None:
    if not job.steps():
        raise ValueError("nothing to measure: --texts 0 and --no-passkey were both given")
    for depth in job.passkey_depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth: expected a number from 0 to 1, got {depth}")


def _texts(folder: Path | None) -> Path:
    if folder is not None:
        read_texts(folder)  # a wrong folder is named before an engine starts
        return folder
    from sparsek_backend.models import fetch_texts

    return fetch_texts()


def _default_model() -> Path:
    from sparsek_backend.models import fetch_model

    return fetch_model()


def _machine(commit: str) -> dict[str, Any]:
    from sparsek_backend.machine import choose_device, describe_machine

    return asdict(describe_machine(choose_device(), commit))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )

"""`sparsek eval`: dense against sparse at several budgets, on a local or a served model."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sparsek_backend.command_line import commands, failing_on, grouped, refuse_set
from sparsek_backend.config import resolve_config
from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.eval.budgets import parse_budget
from sparsek_backend.eval.mass import PHASES, mean_of, measure_model, plot_masses
from sparsek_backend.eval.options import BudgetOptions, EngineOptions, PromptOptions, servers_of
from sparsek_backend.eval.plot import plot_results
from sparsek_backend.eval.prompt import Tokenizer
from sparsek_backend.eval.prompt_file import PromptSet, keep_prompts, load_prompts, save_prompts
from sparsek_backend.eval.record import adopt_dense, read_scores
from sparsek_backend.eval.results import Run, collect_runs, compare_runs, read_results, warnings_of
from sparsek_backend.eval.runs import LocalModel, Workplace, run_server
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.tables import result_tables
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.models import fetch_model
from sparsek_backend.pyplot import import_pyplot
from sparsek_backend.vllm_backend.settings import prefill_pattern

app = commands()
console = Console(markup=False)  # labels and paths may have brackets
_mendable = partial(failing_on, ValueError, ImportError, RuntimeError, OSError)

Scoring = Callable[..., str]
"""Gets where to report progress, and GPUs if it is to keep to some; returns its run's key."""
Commit = Annotated[str, typer.Option(help="Commit to record where there is no git.")]


@app.callback(invoke_without_command=True)
@grouped
def evaluate(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or name; by default SmolLM2-135M-Instruct is prepared."),
    ] = None,
    budgets: BudgetOptions,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Score running servers instead: [LABEL=]http://host:port/v1. Repeatable; the "
            "first is the reference."
        ),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model's name at the servers.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of `sparsek eval prompts`.")] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="An earlier record (.jsonl, .jsonl.xz) with dense attention's scores of these "
            "prompts: dense attention does not run again.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    asked: PromptOptions,
    engine: EngineOptions,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("eval-results"),
    name: Annotated[str, typer.Option(help="Stem of the result files.")] = "quality",
    commit: Commit = "",
) -> None:
    """Measure what sparsity costs a model, dense against sparse.

    Every budget answers the same prompts as dense attention. Writes a table as CSV, everything as
    JSON, a plot, and each score as it is found: the same command continues an interrupted
    evaluation. On several GPUs each takes a budget at a time.
    """
    if context.invoked_subcommand is not None:
        return
    with _mendable():
        if servers := servers_of(base_url or ()):
            reason = "base-url: a server has its own model, budget and engine"
            refuse_set(reason, budgets, engine, model=model, chat=asked.chat, reference=reference)
        elif served_model:
            raise ValueError("served-model: expected with --base-url only; use --model")
        compared = budgets.parsed()
        asked.check(prompts)
        import_pyplot()  # what the end needs is missed at the start
        out.mkdir(parents=True, exist_ok=True)
        what = servers[0][1] if servers else model or str(fetch_model())
        local, gpus = LocalModel(what, engine.arguments()), engine.gpus()
        runs: dict[str, Scoring] = {one.label: partial(local.run, one) for one in compared}
        server = partial(ServedScorer, model=served_model) if servers else None
        if servers:
            gpus = [None]
            runs = {label: partial(run_server, label, url, served_model) for label, url in servers}
        found = take_prompts(prompts, asked, what, server)
        file = keep_prompts(out / name, found)
        place = Workplace(found, file, out / f"{name}.jsonl", commit)
        keys = []
        if reference is not None:
            keys.append(adopt_dense(reference, place.record, found.prompts, local.name))
            del runs[compared[0].label]
        keys += run_all(found, [(x, partial(run, place)) for x, run in runs.items()], gpus)
        _report(place.record, collect_runs(read_scores(place.record), keys, found.prompts), commit)


@app.command("prompts")
@grouped
def make_prompt_file(
    model: Annotated[str, typer.Argument(help="Model folder or name, with its tokenizer.")],
    asked: PromptOptions,
    out: Annotated[
        Path, typer.Option(help="File to write; .gz compresses it.", dir_okay=False)
    ] = Path("prompts.json.gz"),
) -> None:
    """Write a file of prompts as token ids.

    It is for a machine that has the model without its tokenizer.
    """
    with _mendable():
        asked.check()
        found = take_prompts(None, asked, model)
        save_prompts(out, found)
    typer.echo(f"wrote {len(found.prompts)} prompts to {out}")


@app.command("report")
def report(
    record: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The .jsonl file of an evaluation.")
    ],
    commit: Commit = "",
) -> None:
    """Write tables, JSON and plot again from a record.

    The evaluation may be unfinished.
    """
    with _mendable():
        if record.suffix != ".jsonl":  # the results take its name, with other endings
            raise ValueError(f"record: expected a .jsonl file, got {record}")
        _report(record, collect_runs(read_scores(record)), commit)


@app.command("picture")
def draw_picture(
    results: Annotated[list[Path], typer.Argument(help="Result JSONs, of one model or several.")],
    served: Annotated[
        Path | None,
        typer.Option(help="CSV of `sparsek bench serve`, whose speed-ups are drawn below."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Picture to write.", dir_okay=False)] = Path(
        "picture.png"
    ),
) -> None:
    """Draw accuracy and KL divergence over the context.

    Result files, of one model or several, become one picture with a line for each model and budget.
    A budget that several files have is drawn from the last of them.
    """
    with _mendable():
        out.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(f"wrote {plot_results(read_results(results), out, served)}")


@app.command("mass")
@grouped
def measure_mass(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    *,
    budget: Annotated[
        str, typer.Option(help="One budget of block_topk or pattern, as for `sparsek eval`.")
    ] = "block_topk:32",
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt file, for a model without a tokenizer.")
    ] = None,
    asked: PromptOptions,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("eval-results"),
    name: Annotated[str, typer.Option(help="Stem of the result files.")] = "mass",
) -> None:
    """Measure how close a selection comes to dense attention, by layer.

    Writes a CSV and a plot, by layer and KV head. The model reads the first of the prompts through
    Transformers, on a GPU if there is one.
    """
    with _mendable():
        parsed = parse_budget(budget)
        rule = parsed.policy()
        if not (rule.prefill.selects_blocks and rule.decode.selects_blocks):
            raise ValueError(f"budget: expected blocks selected in both phases, got {budget!r}")
        pattern = prefill_pattern(resolve_config(parsed.settings, {}, source="the budget"))
        import_pyplot()
        asked.check(prompts)
        found = take_prompts(prompts, replace(asked, samples=1), model)
        prompt = found.prompts[0]
        keep_prompts(out / name, replace(found, prompts=[prompt]))
        entries = {} if pattern is None else pattern.entries
        with console.status("reading the prompt"):
            masses = measure_model(model, prompt.ids, parsed.policy, entries=entries)
        title = f"{Path(model).name}, {budget}, {prompt.length} tokens, {prompt.task}"
        for phase in PHASES:
            console.print(mean_of(masses, phase))
        typer.echo(f"wrote {write_csv_file(out / f'{name}.csv', masses, digits=6)}")
        typer.echo(f"wrote {plot_masses(out / f'{name}.png', masses, title)}")


def take_prompts(
    given: Path | None,
    asked: PromptOptions,
    model: str,
    server: Callable[[str], Tokenizer] | None = None,
) -> PromptSet:
    """The prompts of a given file, or new ones."""
    if given is not None:
        return load_prompts(given)
    with console.status("making the prompts") as status:
        tokenizer = server(model) if server else HubTokenizer(model, asked.chat)
        return asked.make(tokenizer, model, status.update)


def run_all(
    asked: PromptSet, runs: Sequence[tuple[str, Scoring]], gpus: Sequence[str | None] = (None,)
) -> list[str]:
    """Run everything under one progress bar, one run on each of ``gpus`` at a time; their keys."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    free: SimpleQueue[str | None] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    shown = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True, markup=False))
    with shown as progress, ThreadPoolExecutor(len(gpus)) as pool:
        bar = progress.add_task("", total=len(runs) * len(asked.prompts))

        def run(label: str, scoring: Scoring) -> str:
            def tell(count: int, what: str) -> None:
                progress.update(bar, advance=count, description=f"{label}: {what}")

            begin, gpu = time.monotonic(), free.get()
            try:
                tell(0, "starting")
                key = scoring(tell) if gpu is None else scoring(tell, gpu)
            finally:
                free.put(gpu)
            progress.console.print(f"{label}: done, {time.monotonic() - begin:.0f} s")
            return key

        return list(pool.map(run, *zip(*runs, strict=True)))


def _report(record: Path, runs: Sequence[Run], commit: str) -> None:
    rows = compare_runs(runs)
    if not rows:
        raise ValueError(f"record: expected scores of {runs[0].label}, {record} has none yet")
    for table in result_tables(rows):
        console.print(table)
    for warning in warnings_of(rows):
        console.print(Text.assemble(("warning", "yellow"), f" {warning}"))
    model = runs[0].about["model"]
    document = {
        "model": model,
        "date": datetime.date.today().isoformat(),
        "machine": runs[0].about["machine"],
        "reported_by": asdict(describe_machine(choose_device(), commit)),
        "runs": [run.about for run in runs],
        "warnings": warnings_of(rows),
        "retrieval": rows,
    }
    csv, full, picture = (record.with_suffix(f".{kind}") for kind in ("csv", "json", "png"))
    full.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_csv_file(csv, rows, digits=6)
    for path in (csv, full, plot_results({model: rows}, picture)):
        typer.echo(f"wrote {path}")

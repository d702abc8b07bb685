"""`sparsek train-demo`: train the sparse model and its dense twin, compare, plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.demo.data import RecallTask
from sparsek_backend.nn.demo.model import AttentionKind, ModelConfig
from sparsek_backend.nn.demo.plots import plot_all
from sparsek_backend.nn.demo.train import DemoConfig, RunResult, Trainer, summary

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

TINY = DemoConfig(
    task=RecallTask(num_pairs=4, num_keys=8, num_values=8, num_noise=8),
    model=ModelConfig(
        32, 2, 4, 2, 8, NSAConfig(8, 4, 8, top_n=4, window_size=16, cmp_hidden_size=16)
    ),
    steps=20,
    tokens_per_step=512,
    min_length=64,
    max_length=128,
    save_every=5,
)


def _configs(size: str) -> DemoConfig:
    sizes = {"small": DemoConfig(), "tiny": TINY}
    if size not in sizes:
        raise typer.BadParameter(f"expected one of {', '.join(sizes)}, got {size!r}")
    return sizes[size]


def _table(results: list[RunResult]) -> Table:
    table = Table("attention", "length", "last loss", "recall", "passkey")
    for result in results:
        last = sum(result.losses[-10:]) / len(result.losses[-10:])
        for length, recall in result.recall.items():
            table.add_row(
                result.kind,
                str(length),
                f"{last:.3f}",
                f"{recall['all']:.3f}",
                f"{recall['passkey']:.3f}",
            )
    return table


@app.command()
def train_demo(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, results and plots.")] = Path(
        "train-demo"
    ),
    size: Annotated[str, typer.Option(help="`small` (minutes on a GPU) or `tiny`.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Optimiser steps of each model.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest training sequence.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the data.")] = 0,
    device: Annotated[str, typer.Option(help="`cuda`, `cpu` or `auto`.")] = "auto",
    models: Annotated[str, typer.Option(help="Which to train, comma-separated.")] = "nsa,dense",
    time_lengths: Annotated[
        str, typer.Option(help="Lengths at which to time a step, comma-separated; empty for none.")
    ] = "",
) -> None:
    """Train a sparse transformer and its dense twin on recall; resumes where it stopped."""
    console = Console()
    where = device
    if device == "auto":
        where = "cuda" if torch.cuda.is_available() else "cpu"
    kinds: list[AttentionKind] = []
    for name in models.split(","):
        if name == "nsa":
            kinds.append("nsa")
        elif name == "dense":
            kinds.append("dense")
        else:
            raise typer.BadParameter(f"--models: expected nsa and dense, got {name!r}")
    try:
        config = replace(_configs(size), seed=seed)
        if steps is not None:
            config = replace(config, steps=steps)
        if max_length is not None:
            config = replace(config, max_length=max_length)
        results, times = _train(config, kinds, out, torch.device(where), time_lengths, console)
    except ValueError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(1) from error
    (out / "results.json").write_text(json.dumps(summary(results, times), indent=1))
    console.print(_table(results))
    for path in plot_all(results, times, out):
        console.print(f"wrote {path}")


def _train(
    config: DemoConfig,
    kinds: list[AttentionKind],
    out: Path,
    device: torch.device,
    time_lengths: str,
    console: Console,
) -> tuple[list[RunResult], dict[str, dict[int, float]]]:
    lengths = [int(part) for part in time_lengths.split(",") if part]
    results: list[RunResult] = []
    times: dict[str, dict[int, float]] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for kind in kinds:
            trainer = Trainer(config, kind, out, device)
            bar = progress.add_task(
                kind, total=config.steps, completed=trainer.resumed_at, loss=float("nan")
            )

            def report(done: int, loss: float, bar: int = int(bar)) -> None:
                for task in progress.tasks:
                    if int(task.id) == bar:
                        progress.update(task.id, completed=done, loss=loss)

            trainer.run(report)
            results.append(trainer.result([config.min_length, config.max_length], batches=4))
            if lengths:
                times[kind] = {length: trainer.step_time(length) for length in lengths}
    return results, times

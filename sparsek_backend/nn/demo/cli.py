"""`sparsek train-demo`: train the sparse model and its dense twin, compare, plot."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sparsek_backend.command_line import grouped
from sparsek_backend.machine import choose_device
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.demo.check import LONGEST, check_attention
from sparsek_backend.nn.demo.data import RecallTask
from sparsek_backend.nn.demo.model import AttentionKind, ModelConfig
from sparsek_backend.nn.demo.plots import plot_all
from sparsek_backend.nn.demo.ranks import is_launched, join, leave
from sparsek_backend.nn.demo.selections import overlap, save_inputs, trained_inputs
from sparsek_backend.nn.demo.train import DemoConfig, RunResult, Trainer

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
    timed_tokens=512,
)
_RECALL_BATCHES = 16
_SAVED_KV_HEADS = 4


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training; ``size`` has the defaults of the others."""

    size: Annotated[str, typer.Option(help="`small` (minutes on a GPU) or `tiny`.")] = "small"
    steps: Annotated[int | None, typer.Option(help="Optimiser steps of each model.")] = None
    max_length: Annotated[int | None, typer.Option(help="Longest training sequence.")] = None
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None
    compressed_only: Annotated[
        float | None,
        typer.Option(help="Share of training sequences with the compressed branch alone."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the weights and the data.")] = 0

    def config(self) -> DemoConfig:
        """The configuration of the run.

        Raises:
            typer.BadParameter: an unknown size.
            ValueError: a value that does not fit; the message names it.
        """
        sizes = {"small": DemoConfig(), "tiny": TINY}
        if self.size not in sizes:
            raise typer.BadParameter(
                f"--size: expected one of {', '.join(sizes)}, got {self.size!r}"
            )
        given = {name: x for name, x in asdict(self).items() if name != "size" and x is not None}
        return replace(sizes[self.size], **given)


def _kinds(models: str) -> list[AttentionKind]:
    names = models.split(",")
    for name in names:
        if name not in get_args(AttentionKind):
            raise typer.BadParameter(f"--models: expected nsa and dense, got {name!r}")
    return cast(list[AttentionKind], names)


def _lengths(name: str, text: str, shortest: int) -> list[int]:
    """Comma-separated lengths, checked before anything is trained."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if any(not part.isdecimal() or int(part) < shortest for part in found):
        raise ValueError(f"{name}: expected numbers of at least {shortest} tokens, got {text!r}")
    return sorted({int(part) for part in found})


def _table(results: list[RunResult]) -> Table:
    table = Table("attention", "length", "last loss", "recall", "passkey", "step, ms")
    for result in results:
        last = sum(result.losses[-10:]) / len(result.losses[-10:])
        for length in sorted({*result.recall, *result.step_ms}):
            recall = result.recall.get(length, {})
            table.add_row(
                result.kind,
                str(length),
                f"{last:.4f}" if recall else "",
                *(f"{recall[name]:.2%}" if recall else "" for name in ("all", "passkey")),
                f"{result.step_ms[length]:.1f}" if length in result.step_ms else "",
            )
    return table


def _summary(config: DemoConfig, device: torch.device, results: list[RunResult]) -> dict[str, Any]:
    """Everything that the demo measured, as plain values for JSON."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
        "config": asdict(config),
        "runs": [asdict(result) for result in results],
    }


@app.command()
@grouped
def train_demo(
    context: typer.Context,
    *,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, results and plots.")] = Path(
        "train-demo"
    ),
    training: TrainingOptions,
    device: Annotated[str, typer.Option(help="`cuda`, `cpu` or `auto`.")] = "auto",
    models: Annotated[str, typer.Option(help="Which to train, comma-separated.")] = "nsa,dense",
    time_lengths: Annotated[
        str, typer.Option(help="Lengths at which to time a step, comma-separated; empty for none.")
    ] = "",
    save_inputs_to: Annotated[
        Path | None,
        typer.Option(
            "--save-inputs", help="File for the trained sparse layers' inputs and selections."
        ),
    ] = None,
    save_length: Annotated[int, typer.Option(help="Tokens of the sequences saved.")] = 8192,
    context_parallel: Annotated[
        int,
        typer.Option(
            help="Processes that share the tokens of each sequence. They are started here; under "
            "torchrun there may be a multiple of them, which share the sequences of a batch."
        ),
    ] = 1,
) -> None:
    """Train a sparse transformer and its dense twin on recall; resumes where it stopped."""
    if context_parallel > 1 and not is_launched():
        raise typer.Exit(_launch(context_parallel, context))
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    results: list[RunResult] = []
    try:
        where = choose_device(device)
        config = training.config()
        timed = _lengths("--time-lengths", time_lengths, config.task.min_length)
        _lengths("--save-length", str(save_length), config.task.min_length)
        out.mkdir(parents=True, exist_ok=True)
        ranks = join(context_parallel, where)
        trained = [Trainer(config, kind, out, where, ranks) for kind in _kinds(models)]
        for trainer in trained:
            _train(trainer, console)
        if ranks is not None:
            is_first = ranks.is_first
            leave()
            if not is_first:
                return
            trained = [trainer.alone() for trainer in trained]
        for trainer in trained:
            results.append(_measure(trainer, timed, console))
            if trainer.kind == "nsa" and save_inputs_to is not None:
                sequences = max(_SAVED_KV_HEADS // config.model.num_layers, 1)
                save_inputs(trainer, save_inputs_to, save_length, sequences)
                console.print(f"wrote {save_inputs_to}")
    except (ValueError, FloatingPointError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from error
    summary = _summary(config, where, results)
    (out / "results.json").write_text(json.dumps(summary) + "\n")
    console.print(_table(results))
    console.print(f"wrote {out / 'results.json'}")
    try:
        for path in plot_all(results, out):
            console.print(f"wrote {path}")
    except ImportError as error:
        console.print(f"no plots: {error}", markup=False)


def _launch(count: int, context: typer.Context) -> int:
    """Run this command in ``count`` processes of this machine; their exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "sparsek_backend", "train-demo"]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            command += [parameter.opts[0], str(context.params[name])]
    return subprocess.run(command, check=False).returncode


def _train(trainer: Trainer, console: Console) -> None:
    """Run to the last step behind a progress bar, with a line at each checkpoint."""
    config = trainer.config
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(
            trainer.kind, total=config.steps, completed=trainer.resumed_at, loss=float("nan")
        )

        def report(done: int, loss: float) -> None:
            progress.update(bar, completed=done, loss=loss)
            if done % config.save_every == 0:
                length = config.length_at(done - 1)
                line = (
                    f"{trainer.kind} step {done}/{config.steps}, {length} tokens: loss {loss:.4f}"
                )
                if trainer.ranks is None:
                    line += f", recall {trainer.recall(length, 1)['all']:.1%}"
                progress.console.print(line)

        trainer.run(report)


def _measure(trainer: Trainer, timed: list[int], console: Console) -> RunResult:
    """Recall, step times and overlap; sparse attention is checked before it is timed."""
    config = trainer.config
    result = RunResult(trainer.kind, trainer.losses, {}, trainer.resumed_at)
    for length in sorted({config.min_length, config.max_length}):
        with console.status(f"{trainer.kind}: recall in {length} tokens"):
            result.recall[length] = trainer.recall(length, _RECALL_BATCHES)
    if trainer.kind == "nsa":
        for length in sorted({min(length, LONGEST) for length in timed}):
            worst = check_attention(config.model, length, trainer.device)
            console.print(f"nsa: attention over {length} tokens is within {worst:.1e} of fp64")
    for length in timed:
        with console.status(f"{trainer.kind}: steps with {length} tokens a sequence"):
            result.step_ms[length] = trainer.step_time(length)
    if trainer.kind == "nsa":
        inputs = trained_inputs(trainer, config.max_length, 1)
        found = overlap(inputs["block_indices"])
        result.overlap = {name: x for name, x in found.items() if math.isfinite(x)}
    return result

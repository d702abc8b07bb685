"""`sparsek train-demo`: train the sparse model and its dense twin, compare, draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparsek_backend.command_line import commands, failing_on, token_option
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_backend.train_demo.task import SHORTEST, VALUES
from sparsek_backend.train_demo.train import DemoConfig, Trainer

app = commands()
_RANKS = (1, 2, 4, 8, 16)
"""Processes that can share the shortest sequences, two chunks each."""
_MOST_SEED = 1 << 32
"""Torch's generators take 64 bits, and each step has a seed of its own."""


@app.command()
def train_demo(
    context: typer.Context,
    *,
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, results and a picture.")
    ] = Path("train-demo"),
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each model.")] = 250,
    max_length: Annotated[
        int, token_option("Tokens of the sequences, which grow, at the end.", least=SHORTEST)
    ] = 512,
    compressed_only: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="Share of sequences with the compressed branch alone."),
    ] = 0.5,
    seed: Annotated[
        int, typer.Option(min=-_MOST_SEED, max=_MOST_SEED, help="Seed of weights and data.")
    ] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    device: Annotated[str, typer.Option(help="`cuda`, `cpu` or `auto`.")] = "auto",
    model: Annotated[
        list[str] | None, typer.Option(help="nsa or dense. Repeatable; by default both.")
    ] = None,
    context_parallel: Annotated[
        int,
        typer.Option(
            help="1, 2, 4, 8 or 16 processes that share each sequence; torchrun's where it is.",
        ),
    ] = 1,
) -> None:
    """Train a small natively sparse model and its dense twin.

    The task is recall: values of keys, asked for later. The same command continues a run that was
    stopped. The default run takes a minute of one CPU core.
    """
    with failing_on(ValueError):
        _check_shared(context_parallel, max_length)
    if context_parallel > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(_launch(context_parallel, context))
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    with failing_on(ValueError, RuntimeError, OSError, ImportError):
        config = DemoConfig(steps, max_length, compressed_only, seed, save_every)
        where, kinds = choose_device(device), model or ["nsa", "dense"]
        if not {"nsa", "dense"}.issuperset(kinds):
            raise ValueError(f"--model: expected nsa or dense, got {', '.join(kinds)}")
        if where.type == "cpu":  # threads that wait for another cost more than they compute here
            torch.set_num_threads(1)
        mesh = _join(where)
        trainers = [Trainer(config, kind, out, where, mesh) for kind in kinds]
        for trainer in trainers:
            _train(trainer, console)
        if mesh is not None:
            dist.barrier()
            dist.destroy_process_group()
        if console.quiet:
            return
        results = [_measure(trainer, out) for trainer in trainers]
        console.print(_table(results))
        machine = asdict(describe_machine(where))
        summary = {"machine": machine, "config": asdict(config), "runs": results}
        (out / "results.json").write_text(json.dumps(summary) + "\n")
        console.print(f"wrote {out / 'results.json'} and {_draw(results, out / 'train-demo.png')}")


def _check_shared(ranks: int, max_length: int) -> None:
    if ranks not in _RANKS:
        raise ValueError(f"--context-parallel: expected 1, 2, 4, 8 or 16, got {ranks}")
    if ranks > 1 and max_length % (2 * ranks):
        raise ValueError(
            f"--max-length: expected a multiple of {2 * ranks} with --context-parallel {ranks}, "
            f"got {max_length}"
        )


def _launch(count: int, context: typer.Context) -> int:
    """Run this command in ``count`` processes of this machine; their exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "sparsek_backend", "train-demo"]
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[str(parameter.name)]
            for one in value if isinstance(value, list | tuple) else [value]:
                command += [parameter.opts[0], str(one)]
    return subprocess.run(command, check=False).returncode


def _join(device: torch.device) -> DeviceMesh | None:
    """The ranks that torchrun started; ``None`` for a process of its own."""
    if "WORLD_SIZE" not in os.environ:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _train(trainer: Trainer, console: Console) -> None:
    with Progress(console=console) as progress:
        bar = progress.add_task(trainer.kind, total=trainer.config.steps)
        while len(trainer.losses) < trainer.config.steps:
            loss, recall = trainer.step()
            said = f"{trainer.kind}: loss {loss:.2f}, {recall:4.0%} right"
            progress.update(bar, completed=len(trainer.losses), description=said)


def _measure(trained: Trainer, folder: Path) -> dict[str, Any]:
    """What came of a run, as plain values: measured in this process, from the last checkpoint."""
    trainer = Trainer(trained.config, trained.kind, folder, trained.device)
    lengths = trainer.config.lengths
    found: dict[str, Any] = {
        **{"kind": trainer.kind, "losses": trainer.losses, "recalls": trainer.recalls},
        **{"resumed_at": trained.resumed_at, "recall": {x: trainer.recall(x) for x in lengths}},
    }
    if trainer.kind == "nsa":
        found["compressed_only"] = {x: trainer.recall(x, compressed_only=True) for x in lengths}
        chosen, due = trainer.selections(lengths[-1])
        asks = due >= 0
        found["found"] = float(chosen[asks].gather(1, due[asks][:, None]).double().mean())
        found["by_chance"] = float(chosen[asks].double().mean())
        found["selected"], found["answers"] = chosen[-1].nonzero().tolist(), due[-1].tolist()
    return found


def _table(results: list[dict[str, Any]]) -> Table:
    lengths = list(results[0]["recall"])
    title = f"right answers, of which a guess has {1 / VALUES:.1%}"
    table = Table("tokens", title=title)
    columns = []
    for run in results:
        table.add_column(run["kind"])
        columns.append([run["recalls"][0], *run["recall"].values()])
        if "selected" in run:
            table.add_column("its compressed branch alone")
            columns.append([None, *run["compressed_only"].values()])
            table.caption = (
                f"In {lengths[-1]} tokens nsa selects the block of the answer for "
                f"{run['found']:.1%} of the questions, by chance {run['by_chance']:.1%}."
            )
    for name, *shares in zip(["untrained", *lengths], *columns, strict=True):
        table.add_row(str(name), *("" if x is None else f"{x:.1%}" for x in shares))
    return table


def _draw(results: list[dict[str, Any]], path: Path) -> Path:
    """Right answers by step, and the blocks that the tokens of one sequence select."""
    figure, (left, right) = import_pyplot().subplots(1, 2, figsize=(11, 4.2))
    for run in results:
        left.plot(run["recalls"], label=run["kind"], linewidth=1)
        if "selected" in run:
            asked = [(token, block) for token, block in enumerate(run["answers"]) if block >= 0]
            for name, points in (("selected by nsa", run["selected"]), ("has the answer", asked)):
                right.scatter(*zip(*points, strict=True), s=3, label=name)
            right.legend(loc="upper left")
    left.legend(loc="lower right")
    left.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.02), title="Training")
    right.set(xlabel="token", ylabel="block", title="Blocks in the last layer")
    figure.tight_layout()
    return write_figure(figure, path)

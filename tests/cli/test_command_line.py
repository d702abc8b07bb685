"""Commands whose dataclass parameters stand on the command line as options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from sparsek_backend.command_line import grouped


@dataclass(frozen=True)
class Engine:
    dtype: Annotated[str, typer.Option(help="Of the weights.")]
    eager: bool = False
    length: Annotated[int | None, typer.Option(min=1)] = None


app = typer.Typer()


@app.command()
@grouped
def serve(
    model: Annotated[str, typer.Argument()], engine: Engine, rounds: list[int] | None = None
) -> None:
    """Serve."""
    typer.echo(f"{model} {engine} {rounds}")


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("m --dtype half", "m Engine(dtype='half', eager=False, length=None) None"),
        (
            "m --rounds 1 --eager --dtype half --rounds 2 --length 3",
            "m Engine(dtype='half', eager=True, length=3) [1, 2]",
        ),
    ],
)
def test_a_group_is_made_of_its_options(arguments: str, printed: str) -> None:
    done = CliRunner().invoke(app, arguments.split())
    assert done.output.strip() == printed


@pytest.mark.parametrize("arguments", ["m", "m --dtype half --length 0", "m --engine half"])
def test_options_of_a_group_are_checked(arguments: str) -> None:
    assert CliRunner().invoke(app, arguments.split()).exit_code == 2


def test_help_and_name_are_the_commands_own() -> None:
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert "Of the weights." in done.output
    assert "Serve." in done.output
    assert serve.__name__ == "serve"

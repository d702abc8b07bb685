"""Commands whose dataclass parameters stand on the command line as options."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from sparsek_backend.command_line import failing_on, grouped, token_option, whole_table


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


FAULTS: dict[str, tuple[type[Exception], int]] = {
    "value": (ValueError, 2),
    "not supported": (NotImplementedError, 2),
    "no such file": (FileNotFoundError, 2),
    "at run time": (RuntimeError, 1),
    "of the system": (OSError, 1),
    "said already": (typer.Exit, 3),
}
prompts = typer.Typer(rich_markup_mode=None)


@prompts.command()
def make(
    length: Annotated[list[int], token_option("Of a prompt.", least=16)],
    fault: Annotated[str, typer.Option()] = "",
) -> None:
    """Make prompts."""
    with failing_on(ValueError, RuntimeError, OSError):
        if fault:
            raise FAULTS[fault][0](3)
    typer.echo(length)


def test_lengths_are_tokens_or_thousands_of_them() -> None:
    done = CliRunner().invoke(prompts, ["--length", "16k", "--length", "300", "--length", "1M"])
    assert done.output.strip() == "[16384, 300, 1048576]"
    for wrong in ("15", "16kb", "-3", "1.5k", ""):
        refused = CliRunner().invoke(prompts, ["--length", wrong])
        assert refused.exit_code == 2
        expected = f"expected tokens from 16 on, such as 16384 or 16k, got {wrong!r}"
        assert f"'--length': {expected}" in " ".join(refused.output.split())


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_usage_exits_2_and_other_faults_1(fault: str) -> None:
    done = CliRunner().invoke(prompts, ["--length", "16", "--fault", fault])
    assert done.exit_code == FAULTS[fault][1]
    assert done.stderr.strip() == ("" if fault == "said already" else "error: 3")


def test_help_and_name_are_the_commands_own() -> None:
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert "Of the weights." in done.output
    assert "Serve." in done.output
    assert serve.__name__ == "serve"


def test_a_table_cuts_no_word_off_however_narrow_the_screen() -> None:
    heads = [f"heading {number}" for number in range(9)]
    table = whole_table(*heads, title="a title")
    table.add_row(*(["value-of-a-cell"] * 9))
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    printed = console.file.getvalue()
    assert "…" not in printed
    assert (printed.count("h"), printed.count("-")) == (9, 27)  # every letter is there
    assert max(map(len, printed.splitlines())) <= 80

"""Commands with many options, as functions of few parameters."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from rich import box
from rich.table import Table
from typer.models import Default

WRONG_USAGE = (
    *(ValueError, TypeError, NotImplementedError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError),
)
"""What wrong arguments raise; anything else that is caught is a fault at run time."""


_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def commands(about: str | None = None) -> typer.Typer:
    """An empty app that a command, or with ``about`` a group of commands, is added to.

    Every command of ours looks alike: ``-h`` beside ``--help``, and no value of a variable in an
    error's report.
    """
    return typer.Typer(
        help=Default(None) if about is None else about,  # None itself would hide a docstring
        no_args_is_help=about is not None,
        rich_markup_mode=None,  # in panels, the widest option would leave the help no room
        add_completion=False,
        pretty_exceptions_show_locals=False,
        context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    )


def fail(message: object, status: int = 2) -> typer.Exit:
    """Print one error line and return the exit to raise: 2 for wrong usage, 1 for other faults."""
    typer.echo(f"{typer.style('error', fg='red')}: {message}", err=True)
    return typer.Exit(status)


@contextmanager
def failing_on(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that a user can mend into one message and an exit status."""
    try:
        yield
    except typer.Exit:  # a RuntimeError to Python, and said already
        raise
    except kinds as error:
        raise fail(error, 2 if isinstance(error, WRONG_USAGE) else 1) from error


def whole_table(*heads: str, **options: Any) -> Table:
    """Return a table that cuts no word off: what has no room goes on in the next line."""
    table = Table(title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, **options)
    table.padding = (0, 1, 0, 0)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def number(value: float | None, digits: str = ".4g") -> str:
    """A number for a table, or a dash where there is none."""
    return "-" if value is None else format(value, digits)


def token_option(text: str, *, least: int = 1) -> Any:
    """Return an option that takes tokens, as ``16384`` or ``16k``.

    Args:
        text: the help.
        least: the fewest tokens.
    """

    def count(given: str | int) -> int:
        found = re.fullmatch(r"(\d+)([km]?)", str(given).lower())
        if found is None or (size := int(found[1]) * _UNITS[found[2]]) < least:
            expected = f"expected tokens from {least} on, such as 16384 or 16k"
            raise typer.BadParameter(f"{expected}, got {given!r}")
        return size

    return typer.Option(parser=count, metavar="TOKENS", help=text)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command, for typer, with an option for every field of its dataclass parameters.

    A field is annotated, and has a default, as a parameter of a typer command would be.  No field
    has the name of another parameter.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        n: kind for n, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            kind = inspect.Parameter.KEYWORD_ONLY
            options.append(parameter.replace(kind=kind, annotation=hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            options.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=own[field.name],
                )
            )

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(run)["__signature__"] = inspect.Signature(options)
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def check_each(
    name: str, values: Sequence[object] | None, known: Collection[object] | None = None
) -> None:
    """Refuse a value that is given twice, or is none of those ``known``."""
    given = values or ()
    for value in given:
        if known is not None and value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")
        if given.count(value) > 1:
            raise ValueError(f"{name}: {value!r} is given twice")


def refuse_set(reason: str, *groups: Any, **values: Any) -> None:
    """Refuse options that a command would ignore: values, and fields not at their defaults.

    Raises:
        ValueError: some are set; the message has ``reason`` and names them.
    """
    names = [name for name, value in values.items() if value is not None]
    names += [f.name for x in groups for f in fields(x) if getattr(x, f.name) != f.default]
    if names:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"{reason}; drop {options}")

"""Commands with many options, as functions of few parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape


def fail(message: object) -> typer.Exit:
    """Print one error line and return the exit to raise, of status 2."""
    text = f"[red]error[/red]: {escape(str(message))}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    return typer.Exit(2)


@contextmanager
def failing_on(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that a user can mend into one message and exit status 2."""
    try:
        yield
    except kinds as error:
        raise fail(error) from error


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

"""Kernels that launch nothing and note what they are given, through the JIT and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STREAM = 77
Note = tuple[str, tuple[int, ...], list[Any]]
"""A kernel's name, its grid, its arguments."""


class SpiedKernel:
    """A kernel that launches nothing and hands out a compiled one, which notes its arguments."""

    def __init__(self, name: str, arg_names: list[str], notes: list[Note]) -> None:
        self.name, self.arg_names, self.notes = name, arg_names, notes
        self.function, self.packed_metadata = name, "metadata"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def through_the_jit(*args: Any, **options: Any) -> SpiedKernel:
            bound = [*args, *(options[name] for name in self.arg_names[len(args) :])]
            self.notes.append((self.name, (*grid, 1, 1)[:3], bound))
            return self

        return through_the_jit

    def run(self, *args: Any) -> None:
        """Called as Triton's own launchers: grid, stream, kernel, metadata, hooks, arguments."""
        grid, stream, head, bound = args[:3], args[3], args[4:9], args[9:]
        assert stream == STREAM
        assert head == (self.name, "metadata", None, None, None)
        self.notes.append((self.name, grid, list(bound)))


def taken(notes: list[Note]) -> list[Note]:
    """What was noted since the last call."""
    found = notes.copy()
    notes.clear()
    return found

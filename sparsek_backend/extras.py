"""Packages that only some features need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(what: str, *, extra: str) -> Iterator[None]:
    """Let an import inside that fails say what needs which package, and how to install it."""
    try:
        yield
    except ImportError as error:
        raise type(error)(f"{what}: pip install 'sparsek-backend[{extra}]'") from error

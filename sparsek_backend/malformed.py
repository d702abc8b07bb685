"""What others wrote, where it is not what was expected."""

from __future__ import annotations

import csv
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

_REASONS = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error),
    *(LookupError, TypeError, ValueError, AttributeError),
)


@contextmanager
def expecting(what: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Let what fails inside, where a file or an answer is read, raise ``kind`` with ``what``."""
    try:
        yield
    except _REASONS as error:
        raise kind(f"{what} ({type(error).__name__}: {error})") from error

"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, then put it in its place.

    The file gets the permissions of any new file.  safetensors would let its owner alone read it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.touch()
        mode = beside.stat().st_mode & 0o777
        write(beside)
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

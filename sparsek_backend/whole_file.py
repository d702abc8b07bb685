"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from secrets import token_hex


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, then put it in its place.

    The file gets the permissions of any new file.  safetensors would let its owner alone read it.
    """
    # Writers on other machines, and in other containers, may have the same process id.
    beside = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        beside.touch()
        mode = beside.stat().st_mode & 0o777
        write(beside)
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

"""Scripts of benchmarks/, whose functions tests call."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def names_of(script: str) -> dict[str, Any]:
    """Return the names that a script defines, with its folder on the path as when it is run."""
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / script))
    finally:
        sys.path.remove(str(FOLDER))

"""matplotlib, where it is installed: for figures that go to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsek_backend.extras import needing


def import_pyplot() -> Any:
    """matplotlib's pyplot on the file-only backend."""
    with needing("plots need matplotlib", extra="bench"):
        import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def write_figure(figure: Any, path: Path) -> Path:
    """The path, after the figure was written there; its memory is free again."""
    figure.savefig(path, dpi=130)
    import_pyplot().close(figure)
    return path

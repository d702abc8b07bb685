"""matplotlib, where it is installed: for figures that go to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def import_pyplot() -> Any:
    """matplotlib's pyplot on the file-only backend."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'sparsek-backend[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def write_figure(figure: Any, path: Path, dpi: int = 130) -> Path:
    """The path, after the figure was written there; its memory is free again."""
    figure.savefig(path, dpi=dpi)
    import_pyplot().close(figure)
    return path

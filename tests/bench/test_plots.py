"""What the plots of a result file show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsek_backend.bench import plots

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["paged", "nsa", "distributed"])  # the last two count no bytes
def test_times_on_a_log_axis_are_dots(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "write_figure", lambda figure, path: figures.append(figure) or path)
    plots.plot_csv(RESULTS / f"{name}_h200.csv", tmp_path)
    assert figures
    for figure in figures:
        times, ratios = figure.axes
        assert times.get_xscale() == "log"
        assert not times.patches
        assert times.lines
        assert ratios.get_xscale() == "linear"

"""What the picture of an evaluation shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsek_backend.eval import plot

pytest.importorskip("matplotlib")


def row(length: int, variant: str, label: str, **values: float) -> dict[str, Any]:
    found = {"task": "mean", "length": length, "variant": variant, "label": label}
    for name, value in values.items():
        found |= {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.2}
    return found


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    figures: list[Any] = []
    monkeypatch.setattr(plot, "write_figure", lambda figure, path: figures.append(figure) or path)
    return figures


def test_accuracy_and_divergence_over_the_context(drawn: list[Any], tmp_path: Path) -> None:
    rows = [row(n, "plain", "dense", accuracy=0.5) for n in (8192, 16384)]
    rows += [row(n, "plain", "block_topk:96", accuracy=0.4, kl=n / 1e5) for n in (16384, 8192)]
    other = [row(32768, "followed", "dense", accuracy=0.3)]
    plot.plot_results({"qwen": rows, "smol": other}, tmp_path / "q.png")
    [figure] = drawn
    accuracy, second, kl, _ = figure.axes
    assert (accuracy.get_title(), second.get_title()) == ("qwen, plain", "smol, followed")
    [legend] = figure.legends  # below the axes, where it hides nothing
    assert [text.get_text() for text in legend.get_texts()] == ["dense", "block_topk:96"]
    (container,) = kl.containers  # dense attention has no distance from itself
    line, _, (bars,) = container
    assert line.get_xydata().tolist() == [[8192, 0.08192], [16384, 0.16384]]
    (low, high), _ = (segment[:, 1].tolist() for segment in bars.get_segments())
    assert (low, high) == pytest.approx((0.08192 - 0.1, 0.08192 + 0.2))
    assert [text.get_text() for text in kl.get_xticklabels()] == ["8k", "16k", "32k"]


def test_results_without_divergence_are_drawn_without(drawn: list[Any], tmp_path: Path) -> None:
    text = row(4096, "text", "dense", accuracy=0.6)
    plot.plot_results({"m": [row(8192, "plain", "dense", accuracy=0.5), text]}, tmp_path / "q.png")
    plot.plot_results({"m": [text]}, tmp_path / "q.png")
    titles = [[axis.get_title() for axis in figure.axes] for figure in drawn]
    assert titles == [["m, plain"], ["m, text"]]

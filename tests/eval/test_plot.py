"""What the picture of an evaluation shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsek_backend.eval import plot

pytest.importorskip("matplotlib")


def row(length: int, variant: str, label: str) -> dict[str, Any]:
    accuracy = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    shares = {"prefill_share": 0.3, "decode_share": 0.2}
    place = {"length": length, "variant": variant, "label": label}
    return {"task": "mean", **place, **accuracy, **shares}


def test_a_panel_without_results_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plot, "write_figure", lambda figure, path: figures.append(figure) or path)
    cells = [(8000, "plain"), (16000, "plain"), (16000, "followed")]
    rows = [row(*cell, label) for cell in cells for label in ("dense", "block_topk:64")]
    plot.plot_accuracy(rows, tmp_path / "q.png", "qwen")
    [figure] = figures
    titles = [axis.get_title() for axis in figure.axes if axis.axison]
    assert titles == ["8000 tokens, plain", "16000 tokens, plain", "16000 tokens, followed"]
    assert figure.get_suptitle() == "Answers of qwen, dense and sparse"

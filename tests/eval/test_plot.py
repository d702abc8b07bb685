"""What the picture of an evaluation shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsek_backend.eval import plot
from sparsek_backend.eval.cli import app

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
    rows += [row(32768, "followed", "dense", accuracy=0.3)]
    plot.plot_results({"qwen": rows}, tmp_path / "q.png")
    [figure] = drawn
    accuracy, second, kl, _ = figure.axes
    assert (accuracy.get_title(), second.get_title()) == ("plain", "followed")
    [legend] = figure.legends  # below the axes, where it hides nothing
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["qwen: dense", "qwen: block_topk:96"]
    (container,) = kl.containers  # dense attention has no distance from itself
    line, _, (bars,) = container
    assert line.get_xydata().tolist() == [[8192, 0.08192], [16384, 0.16384]]
    (low, high), _ = (segment[:, 1].tolist() for segment in bars.get_segments())
    assert (low, high) == pytest.approx((0.08192 - 0.1, 0.08192 + 0.2))
    assert [text.get_text() for text in kl.get_xticklabels()] == ["8k", "16k", "32k"]


def test_two_models_and_what_was_served_share_the_axis_of_the_context(
    drawn: list[Any], tmp_path: Path
) -> None:
    served = tmp_path / "serve.csv"
    served.write_text(
        "model,context,requests,backend,ttft_ms,tpot_ms\n"
        "llama,131072,4,SPARSEK,100,5\nllama,131072,4,FLASH_ATTN,300,10\n"
        "llama,2048,4,FLASH_ATTN,6,4\nllama,2048,4,SPARSEK,5,8\n"
    )
    small, large = (
        [row(n, "plain", "dense", accuracy=x), row(n, "plain", "window", accuracy=x / 2, kl=x)]
        for n, x in ((8192, 0.4), (65536, 0.8))
    )
    command = ["picture", *(str(tmp_path / f"{name}.json") for name in ("small", "large"))]
    for name, rows in (("small", small), ("large", large)):
        content = json.dumps({"model": name, "retrieval": rows})
        (tmp_path / f"{name}.json").write_text(content)
    command += ["--out", str(tmp_path / "q.png"), "--served"]
    assert CliRunner().invoke(app, [*command, str(served)]).exit_code == 0
    [figure] = drawn
    accuracy, kl, speed = figure.axes
    lines = {x.get_label(): x[0].get_xydata().tolist() for x in accuracy.containers}
    assert lines == {
        "small: dense": [[8192, 0.4]],
        "small: window": [[8192, 0.2]],
        "large: dense": [[65536, 0.8]],
        "large: window": [[65536, 0.4]],
    }
    one, other = (of[0] for of in kl.containers)
    assert one.get_color() == other.get_color()  # a budget's
    assert one.get_linestyle() != other.get_linestyle()  # a model's
    first, further, _ = speed.get_lines()
    assert first.get_label() == "llama, 4 requests: first token"
    assert first.get_xydata().tolist() == [[2048, 1.2], [131072, 3.0]]
    assert further.get_xydata().tolist() == [[2048, 0.5], [131072, 2.0]]
    assert [text.get_text() for text in speed.get_xticklabels()] == ["2k", "8k", "64k", "128k"]
    whole = served.read_text()
    for wrong in (whole.replace("SPARSEK", "ours"), whole[: whole.rindex(",")]):
        served.write_text(wrong)
        refused = CliRunner().invoke(app, [*command, str(served)])
        assert refused.exit_code == 2
        assert "expected the CSV of `sparsek bench serve`" in " ".join(refused.output.split())


def test_results_without_divergence_are_drawn_without(drawn: list[Any], tmp_path: Path) -> None:
    text = row(4096, "text", "dense", accuracy=0.6)
    plot.plot_results({"m": [row(8192, "plain", "dense", accuracy=0.5), text]}, tmp_path / "q.png")
    plot.plot_results({"m": [text]}, tmp_path / "q.png")
    titles = [[axis.get_title() for axis in figure.axes] for figure in drawn]
    assert titles == [["plain"], ["text"]]

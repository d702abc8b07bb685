"""benchmarks/learned_patterns.py: the loss of a text, and a run that goes on where it stopped."""

from __future__ import annotations

import csv
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

from tests.transformers_op import tiny

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "learned_patterns.py"
OPTIONS = ["--toy", "--tokens", "64", "--windows", "1", "--rules", "l2-query-pooled-distance"]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Names of the script."""
    return runpy.run_path(str(SCRIPT))


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_loss_of_a_text_is_the_models_own(script: dict[str, Any]) -> None:
    model, ids = tiny.make_model().eval(), tiny.tokens(1, 45)
    expected = model(ids, labels=ids, use_cache=False).loss.item()
    for step in (7, 44, 1024):
        assert script["text_loss"](model, ids, None, step) == pytest.approx(expected, rel=1e-5)


def test_a_stopped_run_goes_on(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, result = tmp_path / "texts.csv", tmp_path / "result.csv"

    def run(*options: str) -> list[dict[str, str]]:
        command = [*OPTIONS, "--csv", str(result), "--texts-csv", str(texts), *options]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command])
        assert script["main"]() == 0
        return _lines(result)

    run("--judge", "1")
    lines = _lines(texts)
    assert [x["patterns"] for x in lines] == [
        "dense", "sinks and a window of 1", "learned, l2-query-pooled-distance"
    ]  # fmt: skip
    text = texts.read_text(encoding="utf-8").replace(lines[0]["loss"], "1.0")
    texts.write_text(text, encoding="utf-8")

    found = run("--judge", "2")
    assert len(_lines(texts)) == 6, "a line for each pattern on the second text"
    second = float(_lines(texts)[3]["loss"])
    assert float(found[0]["perplexity"]) == pytest.approx(math.exp((1.0 + second) / 2), abs=1e-3)
    assert [x["texts"] for x in found] == ["2"] * 3

    found = run("--judge", "1", "--dtype", "bfloat16")
    assert float(found[0]["perplexity"]) > 10.0, "of another dtype"
    assert [x["dtype"] for x in _lines(texts)] == ["float32"] * 6 + ["bfloat16"] * 3


def test_what_was_learned_is_kept(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(csv_name: str, *rules: str) -> tuple[list[dict[str, str]], int]:
        command = ["--toy", "--tokens", "128", "--windows", "2", "--learn", "2", "--judge", "1"]
        command += ["--importance-dir", str(tmp_path / "kept"), "--csv", str(tmp_path / csv_name)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command, "--rules", *rules])
        assert script["main"]() == 0
        return _lines(tmp_path / csv_name), capsys.readouterr().out.count("read learn")

    first, read = run("first.csv", "windows", "l2-kv")
    assert read == 4, "two texts, by two measures"
    assert float(first[2]["attended"]) <= float(first[1]["attended"]), "not more than the window"
    again, read = run("again.csv", "windows", "l2-kv", "l2-query-pooled")
    assert read == 0
    assert again[:4] == first

"""The examples that need no server."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed_and_compiles() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.rglob("*.py"):
        assert f"({path.relative_to(EXAMPLES)})" in listed
        compile(path.read_text(), str(path), "exec")


def test_a_unet_block_trains_on_our_operators() -> None:
    pytest.importorskip("xformers")
    example = runpy.run_path(str(EXAMPLES / "xformers_unet_block.py"))
    assert example["main"]() < 1e-2


def test_generation_past_the_window_keeps_the_cache_small() -> None:
    pytest.importorskip("gguf")
    example = runpy.run_path(str(EXAMPLES / "endless_generate.py"))
    assert example["main"](["--tokens", "24", "--window-size", "16"]) <= 4 + 16


def test_a_language_model_learns_is_saved_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    sizes = ["--steps", "12", "--batch", "4", "--length", "128"]
    example = runpy.run_path(str(EXAMPLES / "train_nsa.py"))
    losses = example["main"]([*sizes, "--text", str(text), "--out", str(tmp_path / "model")])
    assert losses[-1] < losses[0] - 1
    assert "loaded, it continues" in capsys.readouterr().out


def test_patterns_are_learned_saved_and_attended(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    example = runpy.run_path(str(EXAMPLES / "learn_patterns.py"))
    arguments = ["--tokens", "320", "--share", "0.5", "--out", str(tmp_path / "p.safetensors")]
    kept, dense, sparse = example["main"](arguments)
    assert kept < 0.95
    assert 0 < abs(sparse - dense) < 0.5

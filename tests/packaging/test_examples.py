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

"""The examples of docs/patterns.md run, and run on the block-sparse operator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sparsek_kernels.block_sparse import torch_path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "patterns.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)


IDS = ["learn and attend", "training", "graphs"]
NEEDS = {
    "learn and attend": ("safetensors", "matplotlib"),
    "training": (),
    "graphs": ("scipy", "networkx"),
}


def test_the_document_has_the_examples() -> None:
    marks = ("learn_pattern(", "PatternScheduler(", "GraphAttention(")
    assert len(EXAMPLES) == len(marks)
    assert all(mark in code for mark, code in zip(marks, EXAMPLES, strict=True))


@pytest.mark.parametrize("name", IDS)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    code = EXAMPLES[IDS.index(name)]
    calls: list[str] = []
    _spy(monkeypatch, torch_path, "forward", calls)
    _spy(monkeypatch, torch_path, "backward", calls)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "patterns.md", "exec"), {"__name__": "example"})
    assert calls[0] == "forward"
    assert ("backward" in calls) == ("backward()" in code)
    if name == "learn and attend":
        assert (tmp_path / "pattern.png").read_bytes().startswith(b"\x89PNG")


def _spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: list[str]) -> None:
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(name) or real(*args))

"""The examples of docs/patterns.md run, and run on the block-sparse operator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sparsek_kernels.block_sparse import torch_path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "patterns.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)


def test_the_document_has_the_examples() -> None:
    assert ["xformers" in code for code in EXAMPLES] == [False, True]


@pytest.mark.parametrize("code", EXAMPLES, ids=["learn and attend", "xformers"])
def test_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("safetensors", "matplotlib", *(["xformers"] if "xformers" in code else [])):
        pytest.importorskip(package)
    calls: list[str] = []
    _spy(monkeypatch, torch_path, "forward", calls)
    _spy(monkeypatch, torch_path, "backward", calls)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "patterns.md", "exec"), {"__name__": "example"})
    backward = ["backward"] if "backward()" in code else []
    assert calls == ["forward", *backward]
    if backward:
        assert (tmp_path / "pattern.png").read_bytes().startswith(b"\x89PNG")


def _spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: list[str]) -> None:
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(name) or real(*args))

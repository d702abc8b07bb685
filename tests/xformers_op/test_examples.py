"""The xFormers examples of docs/drop_ins.md run, and run on our kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.xformers_op.cases import fmha

from sparsek_backend.xformers_op import native, uninstall  # isort: skip

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "drop_ins.md"
EXAMPLES = {
    re.search(r"def __call__|install, uninstall|from_tensor_list|SinkWindowMask", code)[0]: code  # type: ignore[index]
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    if "xformers" in code
}


def test_the_document_has_the_examples() -> None:
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_on_our_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[Any] = []
    backwards: list[Any] = []
    for calls, function in ((forwards, "sink_flash_attention"), (backwards, "sink_flash_bwd")):
        monkeypatch.setattr(native, function, _spy(calls, getattr(native, function)))
    try:
        exec(compile(EXAMPLES[name], f"drop_ins.md: {name}", "exec"), {"__name__": "example"})
    finally:
        uninstall()
    assert len(forwards) == 1
    assert len(backwards) == (1 if "backward()" in EXAMPLES[name] else 0)
    assert fmha.dispatch._dispatch_fw_priority_list.__module__.endswith("dispatch")


def _spy(calls: list[Any], real: Any) -> Any:
    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    return spy

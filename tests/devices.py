"""Proof that functions run under ``torch.cuda.device_of``, on machines without a GPU too."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


def spy_on_guards(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[bool]:
    """Whether each call from now on of these functions of a module ran under a guard."""
    guards: list[int] = []
    found: list[bool] = []

    class Guard(torch.cuda.device_of):
        def __enter__(self) -> None:
            guards.append(self.idx)
            super().__enter__()

        def __exit__(self, *error: Any) -> None:
            guards.pop()
            super().__exit__(*error)

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(bool(guards))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    for name in names:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return found

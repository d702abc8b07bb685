"""Sparse attention kernels: torch and triton only, one public function per operation.

Names are resolved on first use, so ``import sparsek_kernels`` stays cheap and does not import
Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsek_kernels.sink_window.api import sink_flash_attention as sink_flash_attention

_EXPORTS = {
    "sink_flash_attention": "sparsek_kernels.sink_window.api",
}

__all__ = ["sink_flash_attention"]


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))

"""Sparse attention kernels: torch and triton only, one public function per operation.

Names are resolved on first use, so ``import sparsek_kernels`` stays cheap and does not import
Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsek_kernels.nsa.api import compressed_attention as compressed_attention
    from sparsek_kernels.nsa.api import nsa_attention as nsa_attention
    from sparsek_kernels.nsa.api import nsa_compress as nsa_compress
    from sparsek_kernels.nsa.api import nsa_select as nsa_select
    from sparsek_kernels.nsa.api import selected_attention as selected_attention
    from sparsek_kernels.sink_window.api import sink_flash_attention as sink_flash_attention

_EXPORTS = {
    "compressed_attention": "sparsek_kernels.nsa.api",
    "nsa_attention": "sparsek_kernels.nsa.api",
    "nsa_compress": "sparsek_kernels.nsa.api",
    "nsa_select": "sparsek_kernels.nsa.api",
    "selected_attention": "sparsek_kernels.nsa.api",
    "sink_flash_attention": "sparsek_kernels.sink_window.api",
}

__all__ = [
    "compressed_attention",
    "nsa_attention",
    "nsa_compress",
    "nsa_select",
    "selected_attention",
    "sink_flash_attention",
]


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))

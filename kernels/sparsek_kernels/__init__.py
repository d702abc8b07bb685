"""Sparse attention kernels: torch and triton only, one public function per operation.

Names are resolved on first use, so ``import sparsek_kernels`` stays cheap and does not import
Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsek_kernels.block_sparse.api import block_sparse_attention as block_sparse_attention
    from sparsek_kernels.nsa.api import compressed_attention as compressed_attention
    from sparsek_kernels.nsa.api import nsa_attention as nsa_attention
    from sparsek_kernels.nsa.api import nsa_compress as nsa_compress
    from sparsek_kernels.nsa.api import nsa_select as nsa_select
    from sparsek_kernels.nsa.api import selected_attention as selected_attention
    from sparsek_kernels.paged.api import paged_attention as paged_attention
    from sparsek_kernels.paged.api import select_blocks as select_blocks
    from sparsek_kernels.paged.api import write_kv as write_kv
    from sparsek_kernels.paged.batch import PagedBatch as PagedBatch
    from sparsek_kernels.paged.policy import SelectionPolicy as SelectionPolicy
    from sparsek_kernels.sink_window.api import sink_flash_attention as sink_flash_attention

_EXPORTS = {
    "PagedBatch": "sparsek_kernels.paged.batch",
    "SelectionPolicy": "sparsek_kernels.paged.policy",
    "block_sparse_attention": "sparsek_kernels.block_sparse.api",
    "compressed_attention": "sparsek_kernels.nsa.api",
    "nsa_attention": "sparsek_kernels.nsa.api",
    "nsa_compress": "sparsek_kernels.nsa.api",
    "nsa_select": "sparsek_kernels.nsa.api",
    "paged_attention": "sparsek_kernels.paged.api",
    "select_blocks": "sparsek_kernels.paged.api",
    "selected_attention": "sparsek_kernels.nsa.api",
    "sink_flash_attention": "sparsek_kernels.sink_window.api",
    "write_kv": "sparsek_kernels.paged.api",
}

__all__ = [
    "PagedBatch",
    "SelectionPolicy",
    "block_sparse_attention",
    "compressed_attention",
    "nsa_attention",
    "nsa_compress",
    "nsa_select",
    "paged_attention",
    "select_blocks",
    "selected_attention",
    "sink_flash_attention",
    "write_kv",
]


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))

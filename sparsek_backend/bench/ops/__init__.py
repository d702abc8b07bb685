"""The ops that `sparsek bench kernels` measures; importing a module registers its ops."""

from __future__ import annotations

import importlib

MODULES = ("sink_window", "paged", "block_sparse", "nsa_decode")


def load() -> None:
    """Register every op of this package."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")

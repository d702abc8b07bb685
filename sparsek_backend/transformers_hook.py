"""Transformers' auto classes know our models once both packages are imported, in any order.

Importing Transformers takes seconds, so nothing here does.  It loads its modules on first use: when
it loads the module of an auto class, the module of ours that registers there is imported next.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTERS = {
    "transformers.models.auto.configuration_auto": "sparsek_backend.transformers_config",
    "transformers.models.auto.modeling_auto": "sparsek_backend.transformers_model",
}
"""Modules of Transformers, and ours that register classes there."""


class _Finder(MetaPathFinder):
    """Finds what the finders after it find, followed by the import of our module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTERS:
            return None
        others = (x for x in sys.meta_path if not isinstance(x, _Finder))
        found = (x.find_spec(fullname, path, target) for x in others)
        spec = next((x for x in found if x is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _followed(loader.exec_module, REGISTERS[fullname])
        return spec


def _followed(run: Callable[[ModuleType], None], ours: str) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        run(module)
        try:
            import_module(ours)
        except Exception:  # a release of Transformers that we do not know must work for others
            logging.getLogger(__name__).warning("SparseK: cannot import %s", ours, exc_info=True)

    return exec_module


def install() -> None:
    """Register now what can be, and the rest when Transformers loads its part."""
    sys.meta_path.insert(0, _Finder())
    for theirs, ours in REGISTERS.items():
        if theirs in sys.modules:
            import_module(ours)

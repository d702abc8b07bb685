"""Transformers' auto classes know our model once both packages are imported, in any order.

Importing Transformers takes seconds, so nothing here does.  Its AutoConfig has a table of names and
imports ``transformers.models.NAME`` when a checkpoint asks for one.  Our name goes into that table
as soon as there is one, and an import of that module finds ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODEL_TYPE = "nsa_llama"
CONFIG_CLASS = "NSALlamaHFConfig"
_TABLE = "transformers.models.auto.configuration_auto"
_OURS = "sparsek_backend.transformers_model"


class _Alias(Loader):
    """Loads a module that has the names of ours."""

    def exec_module(self, module: ModuleType) -> None:
        ours = import_module(_OURS)
        vars(module).update({name: getattr(ours, name) for name in ours.__all__})


class _Finder(MetaPathFinder):
    """Finds our module under Transformers' name, and AutoConfig's table to write ours into."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == f"transformers.models.{MODEL_TYPE}":
            return ModuleSpec(fullname, _Alias())
        if fullname != _TABLE:
            return None
        others = (x for x in sys.meta_path if not isinstance(x, _Finder))
        found = (x.find_spec(fullname, path, target) for x in others)
        spec = next((x for x in found if x is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _then_announce(loader.exec_module)
        return spec


def _then_announce(run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        run(module)
        _announce(module)

    return exec_module


def _announce(table: ModuleType) -> None:
    table.CONFIG_MAPPING_NAMES[MODEL_TYPE] = CONFIG_CLASS
    if hasattr(table, "MODEL_NAMES_MAPPING"):  # older versions: names for their documentation
        table.MODEL_NAMES_MAPPING[MODEL_TYPE] = "NSA Llama"


def install() -> None:
    """Announce our model, now or when Transformers loads its table."""
    sys.meta_path.insert(0, _Finder())
    if _TABLE in sys.modules:
        _announce(sys.modules[_TABLE])

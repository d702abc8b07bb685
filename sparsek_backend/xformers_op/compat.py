"""Names of xFormers, from the place where the installed version keeps them.

Up to 0.0.35 the operators live in ``xformers.ops.fmha``; later versions re-export them from the
``mslk`` package.  Base classes and biases import the same way from both, and the module that
decides which operator runs is found beside the function that asks it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, cast

import torch

try:
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias
    from xformers.ops.fmha.common import (
        AttentionBwOpBase,
        AttentionFwOpBase,
        Context,
        Gradients,
        Inputs,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "sparsek_backend.xformers_op needs xFormers: pip install 'sparsek-backend[xformers]'"
    ) from error

__all__ = [
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "Context",
    "Gradients",
    "Inputs",
    "accept_grouped_gradients",
    "attn_bias",
    "dispatch_module",
    "fmha",
    "fmha_module",
    "register_names",
]


def fmha_module() -> ModuleType:
    """The module that defines ``memory_efficient_attention``."""
    return sys.modules[fmha._memory_efficient_attention.__module__]


def dispatch_module() -> ModuleType:
    """The module that defines xFormers' operator dispatch."""
    return sys.modules[fmha_module()._dispatch_fw.__module__]


def register_names(*ops: type[Any]) -> None:
    """Let ``torch.compile`` pass our operators through xFormers' autograd function by name.

    Only some types may enter a compiled autograd function, so xFormers looks operators up by
    ``NAME`` in a table of its own.
    """
    table: dict[str, type[Any]] = fmha_module()._OPS_LOOKUP
    for op in ops:
        table[op.NAME] = op


def accept_grouped_gradients() -> None:
    """Let gradients of ``[B, M, G, H, K]`` outputs reach the backward operator.

    xFormers' driver brings every gradient that is not 4-D into BMHK as if it were 3-D, and fails
    on 5-D ones before any operator is asked.  3-D and 4-D gradients take xFormers' own way.
    """
    module = fmha_module()
    original = module.bmk2bmhk
    if getattr(original, "_accepts_bmghk", False):
        return

    def bmk2bmhk(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
        if tensor.ndim == 5:
            return tensor
        return cast(torch.Tensor, original(tensor, num_heads))

    vars(bmk2bmhk)["_accepts_bmghk"] = True
    vars(module)["bmk2bmhk"] = bmk2bmhk

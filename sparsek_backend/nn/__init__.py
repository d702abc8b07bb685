"""Torch modules for training natively sparse models.

Each is imported when it is asked for: a server reads settings here, and needs no context
parallelism.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsek_backend.nn.cache import NSACache
    from sparsek_backend.nn.compression import CompressionMLP
    from sparsek_backend.nn.config import NSAConfig
    from sparsek_backend.nn.llama import NSALlamaConfig, NSALlamaForCausalLM
    from sparsek_backend.nn.native_sparse_attention import NativeSparseAttention
    from sparsek_backend.nn.parallel import KVHeadParallel, tensor_parallel

__all__ = [
    "CompressionMLP",
    "KVHeadParallel",
    "NSACache",
    "NSAConfig",
    "NSALlamaConfig",
    "NSALlamaForCausalLM",
    "NativeSparseAttention",
    "tensor_parallel",
]

_MODULES = {
    "CompressionMLP": "compression",
    "KVHeadParallel": "parallel",
    "NSACache": "cache",
    "NSAConfig": "config",
    "NSALlamaConfig": "llama",
    "NSALlamaForCausalLM": "llama",
    "NativeSparseAttention": "native_sparse_attention",
    "tensor_parallel": "parallel",
}


def __getattr__(name: str) -> object:
    """Import the module of a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

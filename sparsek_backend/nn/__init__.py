"""Torch modules for training natively sparse models."""

from sparsek_backend.nn.cache import NSACache
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.llama import NSALlamaConfig, NSALlamaForCausalLM
from sparsek_backend.nn.native_sparse_attention import CompressionMLP, NativeSparseAttention

__all__ = [
    "CompressionMLP",
    "NSACache",
    "NSAConfig",
    "NSALlamaConfig",
    "NSALlamaForCausalLM",
    "NativeSparseAttention",
]

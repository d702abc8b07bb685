"""Torch modules for training natively sparse models."""

from sparsek_backend.nn.cache import NSACache
from sparsek_backend.nn.compression import CompressionMLP
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.nn.llama import NSALlamaConfig, NSALlamaForCausalLM
from sparsek_backend.nn.native_sparse_attention import NativeSparseAttention
from sparsek_backend.nn.tensor_parallel import KVHeadParallel, tensor_parallel

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

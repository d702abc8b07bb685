"""Attention of sequences that lie on several ranks: context parallelism on torch.distributed."""

from sparsek_backend.distributed.block_sparse import (
    balanced_layout,
    context_parallel_block_sparse_attention,
)
from sparsek_backend.distributed.gradients import sum_gradients
from sparsek_backend.distributed.layouts import SequenceLayout, shard, unshard
from sparsek_backend.distributed.nsa import Compression, context_parallel_nsa_attention
from sparsek_backend.distributed.sink_window import context_parallel_sink_flash_attention

__all__ = [
    "Compression",
    "SequenceLayout",
    "balanced_layout",
    "context_parallel_block_sparse_attention",
    "context_parallel_nsa_attention",
    "context_parallel_sink_flash_attention",
    "shard",
    "sum_gradients",
    "unshard",
]

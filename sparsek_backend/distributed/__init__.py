"""Attention of sequences that lie on several ranks: context parallelism on torch.distributed."""

from sparsek_backend.distributed.layouts import SequenceLayout, shard, unshard
from sparsek_backend.distributed.sink_window import context_parallel_sink_flash_attention

__all__ = [
    "SequenceLayout",
    "context_parallel_sink_flash_attention",
    "shard",
    "unshard",
]

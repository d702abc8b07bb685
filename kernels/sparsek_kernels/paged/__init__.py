"""Attention over a paged KV cache, with block selection shared by a GQA group."""

from sparsek_kernels.paged.api import (
    paged_attention,
    select_blocks,
    write_gate_keys,
    write_kv,
    write_means,
)
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.lists import block_lists
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy
from sparsek_kernels.paged.seer.gates import Gates
from sparsek_kernels.paged.shards import attend_shard, merge_shards
from sparsek_kernels.paged.sketch import summary_bytes

__all__ = [
    "CELL_SIZE",
    "Gates",
    "PagedBatch",
    "SelectionPolicy",
    "attend_shard",
    "block_lists",
    "merge_shards",
    "paged_attention",
    "select_blocks",
    "summary_bytes",
    "write_gate_keys",
    "write_kv",
    "write_means",
]

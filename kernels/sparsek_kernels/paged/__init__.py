"""Attention over a paged KV cache, with block selection shared by a GQA group."""

from sparsek_kernels.paged.api import (
    attend_segment,
    paged_attention,
    select_blocks,
    write_index,
    write_kv,
)
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer, Indexers
from sparsek_kernels.paged.index.cell_means import CellMeans
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.index.page_records import PageRecords
from sparsek_kernels.paged.index.seer import Seer
from sparsek_kernels.paged.index.seer.gates import Gates
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash, block_lists
from sparsek_kernels.paged.merge import merge_shards
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.shards import attend_shard

__all__ = [
    "CELL_SIZE",
    "CellMeans",
    "Chosen",
    "Gates",
    "Indexer",
    "Indexers",
    "InfLLM",
    "PageRecords",
    "PagedBatch",
    "Seer",
    "SelectionPolicy",
    "StepPolicy",
    "VerticalSlash",
    "attend_segment",
    "attend_shard",
    "block_lists",
    "merge_shards",
    "paged_attention",
    "select_blocks",
    "summary_bytes",
    "write_index",
    "write_kv",
]

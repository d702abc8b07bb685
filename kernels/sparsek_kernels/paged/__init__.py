"""Attention over a paged KV cache, with block selection shared by a GQA group."""

from .api import paged_attention, select_blocks, summary_vectors, write_kv
from .batch import PagedBatch
from .policy import CELL_SIZE, ScoreKind, SelectionPolicy

__all__ = [
    "CELL_SIZE",
    "PagedBatch",
    "ScoreKind",
    "SelectionPolicy",
    "paged_attention",
    "select_blocks",
    "summary_vectors",
    "write_kv",
]

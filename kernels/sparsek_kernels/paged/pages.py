"""What a KV page holds beside K and V, and who writes it.

Behind the keys and values of a page, every KV head has bytes for the indexer of the layer:
``D / 8`` a token, or more for ``page_records``.  State is keyed by page, never by request: it is
made from the keys in the page, so that prefix hits, preemption and page reuse leave no trace.

| indexer | what it keeps | written |
| --- | --- | --- |
| ``key_means`` | 4-bit means of 4 keys each | by ``write_kv``, as keys arrive |
| ``infllm`` (GPU) | bf16 means of 16 keys | by ``Indexer.write``, when a cell is complete |
| ``seer`` | a float32 gate key of each block | by ``Indexer.write``, when a block is complete |
| ``page_records`` | records (``record.py``) | by ``Indexer.write``, when 64 keys are complete |
| ``two_step``, ``vertical_slash`` | nothing | |
"""

from __future__ import annotations

from sparsek_kernels.paged.policy import CELL_SIZE, ceil_div

ALIGNMENT = 16
"""Bytes: a multiple of them is kept per page and KV head, so that pages stay aligned."""

MOST_DIM = 512
"""Channels of a head at most: each of a row's runs of 4 bytes has a number of 6 bits."""


def check_head_dim(head_dim: int) -> None:
    """Check that rows are a whole number of 4 bytes, and not too long.

    Raises:
        NotImplementedError: they are not.
    """
    if head_dim % 8 or head_dim > MOST_DIM:
        raise NotImplementedError(
            f"head_dim: selecting blocks needs a multiple of 8 up to {MOST_DIM}, got {head_dim}; "
            "attend everything, or sinks and a window alone (top_k=0)"
        )


def check_cells(page_size: int) -> None:
    """Check that a page holds whole cells.

    Raises:
        ValueError: it does not.
    """
    if page_size < CELL_SIZE or page_size % CELL_SIZE:
        raise ValueError(f"page_size: expected a multiple of {CELL_SIZE}, got {page_size}")


def summary_bytes(page_size: int, head_dim: int) -> int:
    """Bytes that most indexers have in one page per KV head.

    Raises:
        ValueError: the page does not hold whole cells.
        NotImplementedError: rows would be no whole number of 4 bytes, or too long.
    """
    check_head_dim(head_dim)
    check_cells(page_size)
    return ceil_div(page_size * head_dim // 8, ALIGNMENT) * ALIGNMENT

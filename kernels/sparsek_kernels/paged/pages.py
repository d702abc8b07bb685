"""What a KV page holds beside K and V, and who writes it.

Behind the keys and values of a page, every KV head has bytes for the indexer of the layer.  State
is keyed by page, never by request: it is made from the keys in the page, so that prefix hits,
preemption and page reuse leave no trace.

| indexer | what it keeps | written |
| --- | --- | --- |
| ``page_records`` | records (``record.py``) | by ``write_kv``, when 64 keys are complete |
| ``infllm`` (GPU) | bf16 means of 16 keys | by ``Indexer.write``, when a cell is complete |
| ``seer`` | a float32 gate key of each block | by ``Indexer.write``, when a block is complete |
| ``cell_means``, ``vertical_slash`` | nothing | |
"""

from __future__ import annotations

from sparsek_kernels.paged.policy import CELL_SIZE, SEGMENT, ceil_div
from sparsek_kernels.paged.record import ALIGNMENT, check_head_dim, page_bytes


def mean_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of a page's bf16 means of 16 keys, per KV head.

    Raises:
        ValueError: the page does not hold whole cells.
        NotImplementedError: a head dimension that is not served.
    """
    check_head_dim(head_dim)
    if page_size < CELL_SIZE or page_size % CELL_SIZE:
        raise ValueError(f"page_size: expected a multiple of {CELL_SIZE}, got {page_size}")
    return ceil_div(page_size * head_dim // 8, ALIGNMENT) * ALIGNMENT


def summary_bytes(page_size: int, head_dim: int) -> int:
    """Bytes that are enough for any indexer's in one page per KV head.

    Records need pages of whole segments: others have no room for them.

    Raises:
        ValueError: the page does not hold whole cells.
        NotImplementedError: a head dimension that is not served.
    """
    if page_size and page_size % SEGMENT == 0:
        return page_bytes(page_size, head_dim)
    return mean_bytes(page_size, head_dim)

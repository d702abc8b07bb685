"""Launch configuration of the exact top-n that indexers share."""

from __future__ import annotations


def top_warps(max_blocks: int) -> tuple[int, int]:
    """Warps that share one row of scores, and registers of a thread.

    Two programs then share a multiprocessor, where the scores of a row fit into their registers.
    """
    if max_blocks <= 2048:
        return 8, 128
    return 16, 64 if max_blocks <= 8192 else 128

"""What the records' kernels know when they are compiled."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """What a token chooses, as compile-time constants."""

    SINK_BLOCKS: int
    REACH_BLOCKS: int
    SCORED_BLOCKS: int
    KEYS: int


class Shape(NamedTuple):
    """Queries and pages, as compile-time constants."""

    QUERY_LEN: int
    NUM_KV_HEADS: int
    GROUP: int
    HEADS: int
    COLUMNS: int
    HEAD_DIM: int
    PAGE_SIZE: int
    RECORD: int

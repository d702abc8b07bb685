"""Compile-time constants of ``attend_kernel``, which takes them in three tuples."""

from __future__ import annotations

from typing import NamedTuple

from sparsek_kernels.paged.policy import Growth


class Rule(NamedTuple):
    """What a tile attends, as compile-time constants."""

    MODE: int
    TILE: int
    POLICY_TILE: int
    SEL_BLOCK: int
    SINK_BLOCKS: int
    REACH_BLOCKS: int
    SCORED_BLOCKS: int
    GROWTH: Growth | None
    ALIGN: int
    SAMPLE: bool  # whether entries of lists are cells with weights
    BY_REQUEST: bool  # whether a tile is a decoding request, whose first token decides


class Shape(NamedTuple):
    """Queries and pages, as compile-time constants."""

    FROM_TABLE: bool
    TILES_PER_REQUEST: int
    NUM_KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_D: int
    PAGE_SIZE: int
    HAS_SINKS: bool
    SHARDED: bool
    JOINED: bool  # whether K and V have the same strides
    UNIT: int  # elements in which 32 bits say where a row of K or V begins; 1 in 64 bits


class Tiling(NamedTuple):
    """How the work is cut, as compile-time constants."""

    QUERIES: int
    BLOCK_H: int
    BLOCK_M: int
    BLOCK_N: int
    MOST_SPLITS: int  # programs that share a tile, at most
    NUM_STAGES: int

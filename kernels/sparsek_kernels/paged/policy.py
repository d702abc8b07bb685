"""What one query of a paged sequence may attend, as pure integer arithmetic.

Every consumer of the rule (the oracle, the CPU path, the Triton kernels, the metrics) takes its
numbers from here, so the rule exists once.  The long form is docs/selection.md.

Positions are absolute token indices of a sequence, a *block* is ``sel_block_size`` consecutive
positions, and a *tile* is ``query_tile`` consecutive, tile-aligned query positions that share one
selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

CELL_SIZE = 16
"""Tokens per summary vector: a page of P tokens carries P / CELL_SIZE vectors per KV head."""

SAMPLE_STRIDE = 16
"""Query positions of a prefill tile for which one query stands when blocks are scored."""

MOST_SAMPLES = 16
"""Most queries that a tile is scored by."""

ScoreKind = Literal["cell_mean", "min_max"]


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``, for ``b > 0``."""
    return -(-a // b)


@dataclass(frozen=True)
class SelectionPolicy:
    """How much of its past a query attends.

    Three cases, told apart by the fields alone:

    * *dense*: ``window_size is None``.  Query ``i`` sees every key ``j <= i``.
    * *sink-window*: ``window_size`` set, ``top_k == 0``.  Query ``i`` sees ``j <= i`` with
      ``j < num_sink`` or ``j > i - window_size``, exact to the token.
    * *block top-k*: ``top_k > 0``.  Query ``i`` sees, causally, a fixed number of whole blocks
      (:attr:`budget_blocks`): the sink blocks, the blocks its tile's windows touch, and the
      highest-scoring of the rest.  Sinks and window are therefore always seen in full.

    Args:
        num_sink: first tokens of the sequence that every query sees.  Block top-k rounds it up to
            whole blocks.
        window_size: latest tokens (the query's own included) that every query sees, or ``None``.
        top_k: blocks beyond sinks and window.  A block that the window straddles is the first of
            them, so that the number of blocks attended never depends on alignment.
        sel_block_size: tokens in a block; a multiple of ``CELL_SIZE``.
        dense_below: queries at positions below this see every earlier key; with block top-k, those
            of a tile whose last position is below it.
        dense_last: last queries of every prefill, or chunk of one, that see every earlier key: few
            enough to cost little, and the ones that a prompt's answer hangs on.
        query_tile: query positions that share one selection (block top-k).  1 makes prefill select
            exactly as decode does, which (without ``dense_last``) makes tokens independent of
            chunking and preemption.
        score_kind: ``cell_mean`` scores a block by its best 16-token mean of K, ``min_max`` by
            the upper bound that the coordinate-wise range of K allows (Quest, arXiv 2406.10774).
    """

    num_sink: int = 0
    window_size: int | None = None
    top_k: int = 0
    sel_block_size: int = 64
    dense_below: int = 0
    dense_last: int = 0
    query_tile: int = 64
    score_kind: ScoreKind = "cell_mean"

    def __post_init__(self) -> None:
        lowest = {"num_sink": 0, "top_k": 0, "dense_below": 0, "dense_last": 0, "query_tile": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {value}")
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(
                f"window_size: expected an integer >= 1 or None, got {self.window_size}"
            )
        if self.window_size is None and (self.top_k or self.num_sink):
            raise ValueError(
                "window_size: expected an integer when num_sink or top_k is set, got None"
            )
        if self.sel_block_size < CELL_SIZE or self.sel_block_size % CELL_SIZE:
            raise ValueError(
                f"sel_block_size: expected a multiple of {CELL_SIZE}, got {self.sel_block_size}"
            )
        if self.score_kind == "min_max" and self.sel_block_size % (2 * CELL_SIZE):
            raise ValueError(
                f"sel_block_size: min_max scores need a multiple of {2 * CELL_SIZE}, "
                f"got {self.sel_block_size}"
            )

    def per_token(self) -> SelectionPolicy:
        """The same rule with a selection of its own for every query: what decodes follow."""
        if self.query_tile == 1 and not self.dense_last:
            return self
        return replace(self, query_tile=1, dense_last=0)

    @property
    def sample_stride(self) -> int:
        """Query positions of a tile that one sampled query stands for."""
        return max(SAMPLE_STRIDE, ceil_div(self.query_tile, MOST_SAMPLES))

    @property
    def samples(self) -> int:
        """Queries that a tile is scored by: the last of every ``sample_stride`` positions."""
        return ceil_div(self.query_tile, self.sample_stride)

    @property
    def is_dense(self) -> bool:
        """Whether every key is visible (up to causality)."""
        return self.window_size is None

    @property
    def selects_blocks(self) -> bool:
        """Whether blocks are chosen by score, and page summaries are therefore needed."""
        return self.top_k > 0

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold the sinks."""
        return ceil_div(self.num_sink, self.sel_block_size)

    @property
    def reach_blocks(self) -> int:
        """Blocks before a query's own that its window may touch, whatever its position."""
        return ceil_div((self.window_size or 1) - 1, self.sel_block_size)

    @property
    def budget_blocks(self) -> int:
        """Blocks a single query attends at most (block top-k)."""
        return self.sink_blocks + ceil_div(self.window_size or 1, self.sel_block_size) + self.top_k

    @property
    def local_blocks(self) -> int:
        """Most blocks that the windows of one tile touch, whatever its position."""
        size = self.sel_block_size
        latest_start = size - math.gcd(size, self.query_tile)  # of a tile, within its first block
        return self.reach_blocks + ceil_div(latest_start + self.query_tile, size)

    def local_range(self, position: int) -> tuple[int, int]:
        """Half-open range of blocks that the window of the tile at ``position`` touches.

        The range ends at the block of ``position`` itself, never at a later one of its tile.
        """
        tile_start = position - position % self.query_tile
        first = max(tile_start // self.sel_block_size - self.reach_blocks, 0)
        return first, position // self.sel_block_size + 1

    @property
    def scored_blocks(self) -> int:
        """Blocks chosen by score for each tile, where there are that many candidates."""
        return max(self.budget_blocks - self.sink_blocks - self.reach_blocks - 1, 0)

    def candidate_range(self, position: int) -> tuple[int, int]:
        """Half-open range of blocks that compete by score for the tile at ``position``."""
        first_local, _ = self.local_range(position)
        return min(self.sink_blocks, first_local), first_local

    def sees_all(self, position: int) -> bool:
        """Whether the query at ``position`` attends every earlier key.

        Block top-k decides that for a tile as a whole, sink-window for every query.
        """
        if self.is_dense:
            return True
        if not self.selects_blocks:
            return position < max(self.dense_below, self.num_sink + (self.window_size or 0))
        if position - position % self.query_tile + self.query_tile <= self.dense_below:
            return True
        first, last = self.candidate_range(position)
        return last - first <= self.scored_blocks

    def attended_tokens(self, position: int) -> int:
        """Keys that the query at ``position`` attends: a function of position alone.

        Queries that ``dense_last`` exempts attend ``position + 1`` keys instead.
        """
        length = position + 1
        if self.sees_all(position):
            return length
        if not self.selects_blocks:
            return min(length, self.num_sink + (self.window_size or 0))
        first_local, _ = self.local_range(position)
        local = length - first_local * self.sel_block_size
        return local + (self.sink_blocks + self.scored_blocks) * self.sel_block_size

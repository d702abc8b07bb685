"""What one query of a paged sequence may attend, as pure integer arithmetic.

Every consumer of the rule (the oracle, the CPU path, the Triton kernels, the metrics) takes its
numbers from here, so the rule exists once.  The long form is docs/selection.md.  Methods take one
position or an array of them.

Positions are absolute token indices of a sequence, a *block* is ``sel_block_size`` consecutive
positions, and a *tile* is ``query_tile`` consecutive, tile-aligned query positions that share one
selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

CELL_SIZE = 16
"""Tokens of a cell: the block that a single token selects."""

SAMPLE_STRIDE, MOST_SAMPLES = 4, 16
"""Query positions of a prefill tile for which one query scores all blocks by summaries, and the
most queries of a tile that do."""

RANKING_STRIDE, MOST_RANKING = 2, 32
"""The same of the queries that rank candidates by their real keys."""

CANDIDATES = 2
"""Blocks of a tile that are ranked by their real keys, for each place."""

Ranking: TypeAlias = Literal["masses", "infllm", "seer"]
"""How blocks are ranked: by the two steps of docs/selection.md, by InfLLM-v2's own scores, or, for
single tokens, by SeerAttention-R's gates."""

SMALLEST_GATED = 32
"""Tokens of the smallest block whose gate key has room in place of the sketch."""

Positions: TypeAlias = Any
"""An integer, or an array of them (NumPy, PyTorch): the rule is the same arithmetic for all."""


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
        ranking: how blocks that compete are ranked.  ``infllm`` is per token, with one ``top_k``
            for all.  ``seer`` is of single tokens; tiles are ranked as by ``masses``.
        decode_top_k: ``top_k`` of a single token; ``None``: as many blocks as a tile.
    """

    num_sink: int = 0
    window_size: int | None = None
    top_k: int = 0
    sel_block_size: int = 64
    dense_below: int = 0
    dense_last: int = 0
    query_tile: int = 64
    ranking: Ranking = "masses"
    decode_top_k: int | None = None

    def __post_init__(self) -> None:
        lowest = {"num_sink": 0, "top_k": 0, "dense_below": 0, "dense_last": 0, "query_tile": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {value!r}")
        window, single = self.window_size, self.decode_top_k
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"window_size: expected an integer >= 1 or None, got {window!r}")
        if window is None and (self.top_k or self.num_sink):
            raise ValueError(
                "window_size: expected an integer when num_sink or top_k is set, got None"
            )
        if single is not None and (not isinstance(single, int) or single < 1 or not self.top_k):
            raise ValueError(
                "decode_top_k: expected an integer >= 1 beside a top_k >= 1, or None, got "
                f"{single!r} beside {self.top_k}"
            )
        size = self.sel_block_size
        if not isinstance(size, int) or size < CELL_SIZE or size % CELL_SIZE:
            raise ValueError(f"sel_block_size: expected a multiple of {CELL_SIZE}, got {size!r}")
        if self.ranking not in get_args(Ranking):
            raise ValueError(
                f"ranking: expected one of {', '.join(get_args(Ranking))}, got {self.ranking!r}"
            )
        if self.ranking == "infllm" and (self.query_tile != 1 or self.dense_last or single):
            raise ValueError(
                "ranking: expected 'masses' where query_tile is not 1, dense_last not 0 or "
                f"decode_top_k not None, got 'infllm' with {self.query_tile}, {self.dense_last} "
                f"and {single}"
            )
        if self.ranking == "seer" and size < SMALLEST_GATED:
            raise ValueError(
                f"ranking: expected 'masses' where sel_block_size is below {SMALLEST_GATED}, got "
                f"'seer' with {size}"
            )

    def per_token(self) -> SelectionPolicy:
        """The policy of a single token: its own budget, selected for it alone, by the cell.

        A selection that tokens do not share can follow each of them closely, so its blocks are as
        small as a cell.  Sinks and window cover as many tokens as before, ``top_k`` as many as
        ``decode_top_k`` says.  Blocks of a learned ranking keep the size that it was trained with.
        """
        return self._per_token

    @cached_property
    def _per_token(self) -> SelectionPolicy:
        if self.ranking == "infllm":
            return self
        by_cells = self.selects_blocks and self.ranking == "masses"
        size = CELL_SIZE if by_cells else self.sel_block_size
        alone = self.query_tile == 1 and not self.dense_last and self.decode_top_k is None
        if alone and size == self.sel_block_size:
            return self
        ratio = self.sel_block_size // size
        top_k = self.top_k if self.decode_top_k is None else self.decode_top_k
        return replace(
            self,
            sel_block_size=size,
            top_k=top_k * ratio,
            query_tile=1,
            dense_last=0,
            decode_top_k=None,
        )

    @property
    def sample_stride(self) -> int:
        """Query positions of a tile that one sampled query stands for."""
        return max(min(SAMPLE_STRIDE, self.query_tile), ceil_div(self.query_tile, MOST_SAMPLES))

    @property
    def samples(self) -> int:
        """Queries that score a tile's blocks: the last of every ``sample_stride`` positions."""
        return ceil_div(self.query_tile, self.sample_stride)

    @property
    def ranking_stride(self) -> int:
        """Query positions of a tile for which one query ranks its candidates."""
        return max(min(RANKING_STRIDE, self.query_tile), ceil_div(self.query_tile, MOST_RANKING))

    @property
    def ranking_samples(self) -> int:
        """Queries that rank a tile's candidates: the last of every ``ranking_stride`` positions."""
        return ceil_div(self.query_tile, self.ranking_stride)

    @property
    def listed_blocks(self) -> int:
        """Most blocks of a tile that are ranked exactly; a single token's are not."""
        return CANDIDATES * self.scored_blocks if self.query_tile > 1 else 0

    @property
    def is_dense(self) -> bool:
        """Whether every key is visible (up to causality)."""
        return self.window_size is None

    @property
    def is_band(self) -> bool:
        """Whether every query sees its latest keys alone: all of them, or one window's."""
        if self.window_size is None:
            return True
        return not self.num_sink and not self.top_k and self.dense_below <= self.window_size

    @property
    def selects_blocks(self) -> bool:
        """Whether blocks are chosen by score, and page summaries are therefore needed."""
        return self.top_k > 0

    @cached_property
    def sink_blocks(self) -> int:
        """Blocks that hold the sinks."""
        return ceil_div(self.num_sink, self.sel_block_size)

    @cached_property
    def reach_blocks(self) -> int:
        """Blocks before a query's own that its window may touch, whatever its position."""
        return ceil_div((self.window_size or 1) - 1, self.sel_block_size)

    @cached_property
    def budget_blocks(self) -> int:
        """Blocks a single query attends at most (block top-k)."""
        return self.sink_blocks + ceil_div(self.window_size or 1, self.sel_block_size) + self.top_k

    @cached_property
    def local_blocks(self) -> int:
        """Most blocks that the windows of one tile touch, whatever its position."""
        size = self.sel_block_size
        latest_start = size - math.gcd(size, self.query_tile)  # of a tile, within its first block
        return self.reach_blocks + ceil_div(latest_start + self.query_tile, size)

    def num_tiles(self, begin: int, end: int) -> int:
        """Tiles that hold the positions ``[begin, end)``."""
        return (end - 1) // self.query_tile - begin // self.query_tile + 1 if end > begin else 0

    def local_range(self, position: Positions) -> tuple[Positions, Positions]:
        """Half-open range of blocks that the window of the tile at ``position`` touches.

        The range ends at the block of ``position`` itself, never at a later one of its tile.
        """
        tile_start = position - position % self.query_tile
        first = _at_least(tile_start // self.sel_block_size - self.reach_blocks, 0)
        return first, position // self.sel_block_size + 1

    @cached_property
    def scored_blocks(self) -> int:
        """Blocks chosen by score for each tile, where there are that many candidates."""
        return max(self.budget_blocks - self.sink_blocks - self.reach_blocks - 1, 0)

    def candidate_range(self, position: Positions) -> tuple[Positions, Positions]:
        """Half-open range of blocks that compete by score for the tile at ``position``."""
        first_local, _ = self.local_range(position)
        return _at_most(first_local, self.sink_blocks), first_local

    def sees_all(self, position: Positions) -> Positions:
        """Whether the query at ``position`` attends every earlier key.

        Block top-k decides that for a tile as a whole, sink-window for every query.
        """
        if self.window_size is None:
            return position >= 0
        if not self.selects_blocks:
            return position < max(self.dense_below, self.num_sink + self.window_size)
        first, last = self.candidate_range(position)
        below = position - position % self.query_tile + self.query_tile <= self.dense_below
        return below | (last - first <= self.scored_blocks)

    def attended_tokens(self, position: Positions) -> Positions:
        """Keys that the query at ``position`` attends: a function of position alone.

        Queries that ``dense_last`` exempts attend ``position + 1`` keys instead.
        """
        length = position + 1
        if self.window_size is None:
            return length
        if self.selects_blocks:
            first_local, _ = self.local_range(position)
            chosen = self.sink_blocks + self.scored_blocks
            sparse = length + (chosen - first_local) * self.sel_block_size
        else:
            sparse = _at_most(length, self.num_sink + self.window_size)
        return sparse + self.sees_all(position) * (length - sparse)


def _at_least(values: Positions, low: int) -> Positions:
    return max(values, low) if isinstance(values, int) else values.clip(low)


def _at_most(values: Positions, high: int) -> Positions:
    return min(values, high) if isinstance(values, int) else values.clip(None, high)

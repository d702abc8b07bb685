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
from typing import Any, NamedTuple, TypeAlias

from sparsek_kernels.paged.sample import CANDIDATES, MOST_CELLS, MOST_LISTED

CELL_SIZE = 16
"""Tokens whose keys share a mean; blocks and pages are multiples of them."""

SEGMENT, CELL = 64, 2
"""Tokens of a record (``record.py``), and of a cell that is chosen by one."""

SAMPLE_STRIDE, MOST_SAMPLES = 4, 16
"""Sampling stride and cap of the queries of a prefill tile that score all blocks by means."""

RANKING_STRIDE, MOST_RANKING = 2, 32
"""Sampling stride and cap of the queries that weigh candidates by their real keys."""

LAST_TOKENS = 64
"""Tokens of a prompt's end that ``last_part`` leaves to ``dense_last`` in any case."""

Positions: TypeAlias = Any
"""An integer, or an array of them (NumPy, PyTorch): the rule is the same arithmetic for all."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``, for ``b > 0``."""
    return -(-a // b)


class Growth(NamedTuple):
    """How many blocks more deep tiles choose than others.

    Attributes:
        start: position from which a tile chooses more.
        every: blocks past ``start`` for which it chooses one more.
        end: position from which all choose as many: lists have no more room.
    """

    start: int = 32_768
    every: int = 8
    end: int = 131_072

    @classmethod
    def by(cls, more: int, block: int) -> Growth:
        """The usual growth until tiles choose ``more`` blocks of ``block`` tokens than others."""
        usual = cls()
        return usual._replace(end=usual.start + more * usual.every * block)


@dataclass(frozen=True)
class SelectionPolicy:
    """How much of its past a query of one phase attends: of prompts, or of decoded tokens.

    Three cases, told apart by the fields alone:

    * *dense*: ``window_size is None``.  Query ``i`` sees every key ``j <= i``.
    * *sink-window*: ``window_size`` set, ``top_k == 0``.  Query ``i`` sees ``j <= i`` with
      ``j < num_sink`` or ``j > i - window_size``, exact to the token.
    * *block top-k*: ``top_k > 0``.  Query ``i`` sees, causally, as many whole blocks as
      :attr:`budget_blocks` or a few less: the sink blocks, the blocks its tile's windows touch, and
      those that an indexer chooses among the rest, which may count for more than one
      (``sample.py``).  Sinks and window are therefore always seen in full.

    Args:
        num_sink: first tokens of the sequence that every query sees.  Block top-k rounds it up to
            whole blocks.
        window_size: latest tokens (the query's own included) that every query sees, or ``None``.
        top_k: blocks beyond sinks and window.  A block that the window straddles is the first of
            them, so that the number of places never depends on alignment.
        sel_block_size: tokens in a block; a multiple of ``CELL_SIZE``, or with an alignment any
            power of two from 2 on that divides it.
        dense_below: queries at positions below this see every earlier key; with block top-k, those
            of a tile whose last position is below it.
        dense_last: last tokens of a prompt that see every earlier key, whatever chunks it comes in:
            few enough to cost little, and the ones that its answer hangs on.
        query_tile: query positions that share one selection (block top-k).  1 makes prefill select
            exactly as decode does, which (without ``dense_last``) makes tokens independent of
            chunking and preemption.
        alignment: of single tokens that select blocks: sinks end and the window begins at a
            multiple of it, a multiple of ``SEGMENT`` tokens.  The window is rounded up to whole
            segments before the token's own, at least one.  The new tokens of a request then share a
            selection: the first of them decides which blocks compete, and whether all see
            everything.  0: sinks and window end with blocks.
        last_part: where set, ``dense_last`` is at most the prompt's tokens over this, or 64.
        growth: of ``top_k``, for the tiles of long prompts; ``None``: all choose as many.
    """

    num_sink: int = 0
    window_size: int | None = None
    top_k: int = 0
    sel_block_size: int = 64
    dense_below: int = 0
    dense_last: int = 0
    query_tile: int = 64
    alignment: int = 0
    last_part: int = 0
    growth: Growth | None = None

    def __post_init__(self) -> None:
        counts = ("num_sink", "top_k", "dense_below", "dense_last", "last_part", "alignment")
        for name, low in {**dict.fromkeys(counts, 0), "query_tile": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {value!r}")
        window, size = self.window_size, self.sel_block_size
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"window_size: expected an integer >= 1 or None, got {window!r}")
        if window is None and (self.top_k or self.num_sink):
            raise ValueError(
                "window_size: expected an integer when num_sink or top_k is set, got None"
            )
        if self.growth is not None:
            self._check_growth(self.growth)
        if self.alignment:
            self._check_alignment()
        elif not isinstance(size, int) or size < CELL_SIZE or size % CELL_SIZE:
            raise ValueError(f"sel_block_size: expected a multiple of {CELL_SIZE}, got {size!r}")

    def _check_growth(self, growth: Growth) -> None:
        if growth.every < 1 or not 0 <= growth.start <= growth.end:
            raise ValueError(
                f"growth: expected every >= 1 and 0 <= start <= end, got {growth.every}, "
                f"{growth.start} and {growth.end}"
            )
        if self.query_tile == 1 or not self.selects_blocks:
            raise ValueError(
                "growth: expected None where single tokens or no blocks are chosen, got one with "
                f"query_tile={self.query_tile} and top_k={self.top_k}"
            )

    def _check_alignment(self) -> None:
        alignment, size = self.alignment, self.sel_block_size
        if alignment % SEGMENT or self.query_tile != 1 or not self.selects_blocks:
            raise ValueError(
                f"alignment: expected 0, or a multiple of {SEGMENT} with query_tile 1 and top_k >= "
                f"1, got {alignment} with {self.query_tile} and {self.top_k}"
            )
        if self.top_k > MOST_CELLS:
            raise ValueError(
                f"top_k: expected at most {MOST_CELLS} with an alignment (decode_tokens of "
                f"{MOST_CELLS * CELL}), got {self.top_k}"
            )
        if not isinstance(size, int) or size < 2 or size & (size - 1) or alignment % size:
            raise ValueError(
                f"sel_block_size: expected a power of two >= 2 that divides alignment={alignment}, "
                f"got {size!r}"
            )

    def per_token(
        self, top_k: int | None = None, sel_block_size: int = CELL_SIZE
    ) -> SelectionPolicy:
        """The policy of single tokens that choose whole blocks, beside this one of tiles.

        Args:
            top_k: the tokens' own budget in blocks of this policy; ``None``: the same.
            sel_block_size: tokens in a block of theirs.
        """
        own = self.top_k if top_k is None else top_k
        return replace(
            self,
            sel_block_size=sel_block_size if self.selects_blocks else self.sel_block_size,
            top_k=own * self.sel_block_size // sel_block_size if self.selects_blocks else 0,
            query_tile=1,
            dense_last=0,
            last_part=0,
            growth=None,
        )

    def by_records(self, tokens: int) -> SelectionPolicy:
        """The policy of single tokens that choose pairs of keys by records of segments.

        Where this one of tiles selects no blocks, theirs does not either.

        Args:
            tokens: that a token attends beyond sinks and window.
        """
        if not self.selects_blocks:
            return self.per_token()
        if not isinstance(tokens, int) or tokens < CELL:
            raise ValueError(f"tokens: expected an integer >= {CELL}, got {tokens!r}")
        return replace(
            self,
            sel_block_size=CELL,
            top_k=tokens // CELL,
            query_tile=1,
            dense_last=0,
            last_part=0,
            growth=None,
            alignment=SEGMENT,
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
        if self.query_tile == 1:
            return 0
        return self.listed_places(self.scored_blocks)

    @staticmethod
    def listed_places(places: int) -> int:
        """Most blocks of a tile with so many places that are ranked exactly."""
        return max(min(CANDIDATES * places, MOST_LISTED), places)

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
        """Whether an indexer chooses blocks."""
        return self.top_k > 0

    @cached_property
    def segment_blocks(self) -> int:
        """Blocks of a segment, at whose multiples sinks end and the window begins."""
        return self.alignment // self.sel_block_size or 1

    @cached_property
    def sink_blocks(self) -> int:
        """Blocks that hold the sinks."""
        segment = self.segment_blocks
        return ceil_div(self.num_sink, self.sel_block_size * segment) * segment

    @cached_property
    def reach_blocks(self) -> int:
        """Blocks before a query's own that its window may touch, whatever its position.

        With an alignment, blocks before a query's own segment that it attends in any case.
        """
        window, segment = self.window_size or 1, self.segment_blocks
        before = max(window, self.alignment) if self.alignment else window - 1
        return ceil_div(before, self.sel_block_size * segment) * segment

    @cached_property
    def budget_blocks(self) -> int:
        """Blocks a single query attends at most (block top-k)."""
        if self.alignment:
            return self.sink_blocks + self.local_blocks + self.top_k
        return self.sink_blocks + ceil_div(self.window_size or 1, self.sel_block_size) + self.top_k

    @cached_property
    def local_blocks(self) -> int:
        """Most blocks that the windows of one tile touch, whatever its position."""
        if self.alignment:
            return self.reach_blocks + self.segment_blocks
        size = self.sel_block_size
        latest_start = size - math.gcd(size, self.query_tile)  # of a tile, within its first block
        return self.reach_blocks + ceil_div(latest_start + self.query_tile, size)

    def last_rows(
        self, num_q: Positions, num_k: Positions, prompt_left: Positions | None = 0
    ) -> tuple[Positions, Positions]:
        """Half-open range of a prefill's queries that ``dense_last`` exempts; it may be empty.

        Args:
            num_q: its queries.
            num_k: keys of the sequence, the queries' own included.
            prompt_left: tokens of its prompt that come after them; below 0 the queries that follow
                the prompt.  ``None`` where nobody knows: the queries then end their prompt, of
                which ``last_part`` leaves the fewest, since every chunk of it has such an end.
        """
        prompt = 0 if prompt_left is None else num_k + prompt_left
        end = num_q if prompt_left is None else num_q + prompt_left
        count: Positions = self.dense_last
        if self.last_part:
            count = _at_most(_at_least(prompt // self.last_part, LAST_TOKENS), count)
        first, last = (_at_least(_at_most(x, num_q), 0) for x in (end - count, end))
        return first, last

    def num_tiles(self, begin: int, end: int) -> int:
        """Tiles that hold the positions ``[begin, end)``."""
        return (end - 1) // self.query_tile - begin // self.query_tile + 1 if end > begin else 0

    def local_range(self, position: Positions) -> tuple[Positions, Positions]:
        """Half-open range of blocks that the window of the tile at ``position`` touches.

        The range ends at the block of ``position`` itself, never at a later one of its tile.
        """
        tile_start, segment = position - position % self.query_tile, self.segment_blocks
        own = tile_start // (self.sel_block_size * segment) * segment
        first = _at_least(own - self.reach_blocks, 0)
        return first, position // self.sel_block_size + 1

    @cached_property
    def shallow_blocks(self) -> int:
        """Slots that an indexer fills for a tile that does not grow, if so many blocks compete."""
        forced = self.sink_blocks + self.reach_blocks + self.segment_blocks
        return max(self.budget_blocks - forced, 0)

    @cached_property
    def scored_blocks(self) -> int:
        """Slots of a list: as many as the deepest tile fills."""
        return self.shallow_blocks if self.growth is None else self.places(self.growth.end)

    @cached_property
    def deepest_budget(self) -> int:
        """:attr:`budget_blocks` of the deepest tile."""
        return self.budget_blocks + self.scored_blocks - self.shallow_blocks

    def places(self, position: Positions) -> Positions:
        """Slots that an indexer fills for the tile at ``position``, the first of a list."""
        if self.growth is None:
            return self.shallow_blocks
        start, every, end = self.growth
        deep = _at_most(position - position % self.query_tile, end) - start
        return self.shallow_blocks + _at_least(deep, 0) // (every * self.sel_block_size)

    def at(self, position: int) -> SelectionPolicy:
        """The policy of the tile at ``position`` as that of all tiles."""
        if self.growth is None:
            return self
        more = self.places(position) - self.shallow_blocks
        return replace(self, top_k=self.top_k + more, growth=None)

    def within(self, length: int) -> SelectionPolicy:
        """The policy of sequences of up to ``length`` tokens: lists are shorter if none grows."""
        grows = self.longest_shallow is not None and length > self.longest_shallow
        return self if grows else self.at(0)

    @cached_property
    def longest_shallow(self) -> int | None:
        """Tokens of the longest sequence no tile of which grows; ``None`` where none ever does."""
        if self.growth is None or self.scored_blocks == self.shallow_blocks:
            return None
        first = self.growth.start + self.growth.every * self.sel_block_size
        return ceil_div(first, self.query_tile) * self.query_tile

    def candidate_range(self, position: Positions) -> tuple[Positions, Positions]:
        """Half-open range of blocks that compete for the slots of the tile at ``position``."""
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
        return below | (last - first <= self.shallow_blocks)

    def attended_tokens(self, position: Positions, first: Positions | None = None) -> Positions:
        """Keys that the query at ``position`` attends: a function of positions alone.

        Where blocks or cells are chosen as many at most: a sample may leave places over.
        Queries that ``dense_last`` exempts attend ``position + 1`` keys instead.

        Args:
            position: of the query.
            first: of its request's first new token, whose selection it shares where there is an
                alignment; ``None``: its own.
        """
        length = position + 1
        if self.window_size is None:
            return length
        if first is None or not self.alignment:
            first = position
        if self.selects_blocks:
            first_local, _ = self.local_range(first)
            chosen = self.sink_blocks + self.places(first)
            sparse = length - _at_least(first_local - chosen, 0) * self.sel_block_size
        else:
            sparse = _at_most(length, self.num_sink + self.window_size)
        return sparse + self.sees_all(first) * (length - sparse)


@dataclass(frozen=True)
class StepPolicy:
    """What a step's prompts and its decoded tokens attend.

    Args:
        prefill: of prompts, or chunks of them.
        decode: of decoded tokens, each a tile of its own: ``query_tile`` is 1 where they select
            blocks, ``dense_last`` is 0.
    """

    prefill: SelectionPolicy
    decode: SelectionPolicy

    def __post_init__(self) -> None:
        single = self.decode
        if single.dense_last or (single.selects_blocks and single.query_tile != 1):
            raise ValueError(
                "decode: expected query_tile 1 and dense_last 0 (SelectionPolicy.by_records), got "
                f"{single.query_tile} and {single.dense_last}"
            )

    @classmethod
    def of(cls, policy: SelectionPolicy | StepPolicy) -> StepPolicy:
        """The policies of both phases.

        One policy alone gives decoded tokens as many tokens as a tile, by records.

        Raises:
            TypeError: it is no policy.
        """
        if isinstance(policy, StepPolicy):
            return policy
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(
                f"policy: expected a SelectionPolicy or a StepPolicy, got {type(policy).__name__}"
            )
        single = replace(policy, dense_last=0)
        if policy.selects_blocks and not policy.alignment:
            single = policy.by_records(policy.top_k * policy.sel_block_size)
        return cls(single if policy.query_tile == 1 else policy, single)

    @cached_property
    def of_ends(self) -> SelectionPolicy:
        """The policy of a prompt's last tokens that are served as a decode (:meth:`last_rows`).

        Where prompts are dense all of these tokens are.
        """
        if self.prefill.is_dense and not self.decode.is_dense:
            return replace(self.prefill, dense_last=2**31 - 1, last_part=0)
        return self.prefill

    @property
    def selects_blocks(self) -> bool:
        """Whether an indexer chooses blocks in either phase."""
        return self.prefill.selects_blocks or self.decode.selects_blocks


def _at_least(values: Positions, low: int) -> Positions:
    return max(values, low) if isinstance(values, int) else values.clip(low)


def _at_most(values: Positions, high: Positions) -> Positions:
    return min(values, high) if isinstance(values, int) else values.clip(None, high)

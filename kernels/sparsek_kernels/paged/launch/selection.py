"""One call of block selection: what is selected by what, and the tiles of one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.seer.gates import Gates


@dataclass(frozen=True)
class Selection:
    """The queries that select, the keys they select from, and the rule.

    Args:
        out: ``[tiles, Hkv, scored_blocks]`` int32, written.
        q: ``[T, Hq, D]``.
        k_cache: ``[num_pages, Hkv, page_size, D]``.
        k_summary: the sketch that pages keep, by which single tokens select, or InfLLM-v2's means
            (infllm/means.py) or gate keys (seer/gates.py) where the policy ranks by these; or
            ``None``.
        batch: the requests.
        policy: how blocks compete.
        qk_scale: factor of ``q . k`` in base 2.
        tiles: ``[tiles, 2]`` int32, request (or -1) and base of every prefill tile; ``None``: the
            decodes of ``batch`` select, each token for itself.
        largest: elementwise maximum of a contiguous tensor over the ranks that hold the pages
            between them; ``None`` where this rank has them all.
        gates: of a ranking by them, else ``None``.
    """

    out: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    k_summary: torch.Tensor | None
    batch: PagedBatch
    policy: SelectionPolicy
    qk_scale: float
    tiles: torch.Tensor | None = None
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None
    gates: Gates | None = None

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.heads

    @cached_property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence that the batch may hold."""
        return max(ceil_div(self.batch.max_seq_len, self.policy.sel_block_size), 1)

    @cached_property
    def width(self) -> int:
        """Scores of one row: ``max_blocks``, aligned for vector loads."""
        return ceil_div(self.max_blocks, 16) * 16

    @cached_property
    def rows(self) -> int:
        """Rows of the masses of a tile and KV head: its ranking samples times the padded group."""
        return self.policy.ranking_samples * next_power_of_2(self.group)

    @cached_property
    def list_places(self) -> int:
        """Blocks of a tile's list: sinks, local ones and candidates."""
        return self.policy.sink_blocks + self.policy.local_blocks + self.policy.listed_blocks

    def complete(self, scores: torch.Tensor, numel: int) -> torch.Tensor:
        """The first ``numel`` scores, each from the rank that holds its block; flat."""
        return scores if self.largest is None else self.largest(scores[:numel])

    def tile_keys(self) -> dict[str, int | bool]:
        """Compile-time constants of tiles and of the policy."""
        gated = self.gates is not None and self.tiles is None  # one row of logits for a KV head
        return {
            "FROM_TABLE": self.tiles is not None,
            "TILES_PER_REQUEST": 1 if self.tiles is not None else self.batch.decode_query_len,
            "NUM_KV_HEADS": self.heads,
            "GROUP": 1 if gated else self.group,
            "TILE": self.policy.query_tile,
            "SEL_BLOCK": self.policy.sel_block_size,
            "SINK_BLOCKS": self.policy.sink_blocks,
            "REACH_BLOCKS": self.policy.reach_blocks,
            "SCORED_BLOCKS": self.policy.scored_blocks,
        }


@dataclass(frozen=True)
class Step:
    """Neighbouring tiles that go through the kernels together, since scratch is bounded.

    Args:
        first: the first of them (a request's ``decode_query_len`` tiles count, used or not).
        count: how many.
    """

    first: int
    count: int

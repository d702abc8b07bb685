"""One call of an indexer on a GPU: what is chosen by what, and the tiles of one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div


@dataclass(frozen=True)
class Selection:
    """The queries that choose, the keys they choose from, and how many.

    Args:
        out: ``[lists, Hkv, scored_blocks]`` int32, written.
        operands: queries and pages.
        batch: the requests.
        policy: which blocks compete, and for how many slots.
        tiles: ``[tiles, 2]`` int32, request (or -1) and base of every prefill tile; ``None``: the
            decodes of ``batch`` choose, each token for itself or (``Segment.by_request``) together.
    """

    out: torch.Tensor
    operands: PagedOperands
    batch: PagedBatch
    policy: SelectionPolicy
    tiles: torch.Tensor | None = None

    @property
    def q(self) -> torch.Tensor:
        """``[T, Hq, D]``."""
        return self.operands.q

    @property
    def k_cache(self) -> torch.Tensor:
        """``[num_pages, Hkv, page_size, D]``."""
        return self.operands.k_cache

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.operands.heads

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.operands.group

    @cached_property
    def qk_scale(self) -> float:
        """Factor of ``q . k`` in base 2."""
        factor: float = LOG2E.value
        return self.operands.softmax_scale * self.operands.k_scale * factor

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
        """Rows of a tile's block probabilities: its ranking samples times the padded group."""
        return self.policy.ranking_samples * next_power_of_2(self.group)

    @cached_property
    def list_slots(self) -> int:
        """Blocks of a tile's list: sinks, local ones and candidates."""
        return self.policy.sink_blocks + self.policy.local_blocks + self.policy.listed_blocks

    @property
    def lengths(self) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Where the kernels find the positions of a prefill tile."""
        return self.tiles, self.batch.seq_lens, self.batch.cu_seqlens_q

    def of_tokens(self, first: int, last: int, out: torch.Tensor) -> Selection:
        """The query rows ``first .. last - 1`` as decodes of one token each."""
        batch = self.batch.by_token(first, last)
        operands = replace(self.operands, q=self.q[first:last])
        return replace(self, out=out, operands=operands, batch=batch, tiles=None)

    def rule(self) -> dict[str, int]:
        """Compile-time constants of the policy."""
        return {
            "SEL_BLOCK": self.policy.sel_block_size,
            "SINK_BLOCKS": self.policy.sink_blocks,
            "REACH_BLOCKS": self.policy.reach_blocks,
            "SCORED_BLOCKS": self.policy.shallow_blocks,
        }

    def tile_rule(self) -> dict[str, int]:
        """Compile-time constants of the policy and of its tiles."""
        return {"TILE": self.policy.query_tile, **self.rule()}

    def tile_keys(self) -> dict[str, int | bool]:
        """Compile-time constants of tiles and of the policy."""
        return {
            "FROM_TABLE": self.tiles is not None,
            "TILES_PER_REQUEST": 1 if self.tiles is not None else self.batch.decode_query_len,
            "NUM_KV_HEADS": self.heads,
            "GROUP": self.group,
            **self.tile_rule(),
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

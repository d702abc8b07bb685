"""Prefill tiles by a learned list of vertical blocks and slashes: no query is looked at."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparsek_kernels.checks import check_tensor
from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.vertical_slash.lists import block_lists, listed_blocks
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles

__all__ = ["VerticalSlash", "block_lists"]


class VerticalSlash(Indexer):
    """A tile attends the blocks that a list ranks first for its position.

    Args:
        lists: ``[rows, Hkv, scored_blocks]`` int32 of :func:`block_lists` for the policy, where the
            layer runs.
    """

    per_token: ClassVar[bool | None] = False
    batch_invariant: ClassVar[bool] = True

    def __init__(self, lists: torch.Tensor) -> None:
        self.lists = lists

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The lists."""
        return (self.lists,)

    def check(
        self, policy: SelectionPolicy, k_cache: torch.Tensor, num_heads: int | None = None
    ) -> None:
        """Check that the lists are of this policy."""
        super().check(policy, k_cache, num_heads)
        check_tensor(
            "lists",
            self.lists,
            ("rows", k_cache.shape[1], policy.scored_blocks),
            (torch.int32,),
            k_cache.device,
        )

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each tile's blocks; see :meth:`Indexer.select`."""
        starts = _first_positions(operands, segment)
        return Chosen(listed_blocks(self.lists, starts, segment.policy))


def _first_positions(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Where each tile of the prefills begins, ``[tiles]`` int32."""
    batch, policy = segment.batch, segment.policy
    if operands.q.is_cuda:
        return prefill_tiles(batch, policy.query_tile, operands.q.shape[0])[:, 1]
    tile, first = policy.query_tile, []
    for length, count in zip(*host_lengths(batch), strict=True):
        start = length - count
        first += [(start // tile + n) * tile for n in range(policy.num_tiles(start, length))]
    return torch.tensor(first, dtype=torch.int32)

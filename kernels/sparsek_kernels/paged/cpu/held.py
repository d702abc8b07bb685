"""Which pages a rank holds, where several ranks hold a sequence's pages between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeldPages:
    """Which pages of each token's sequence this rank holds.

    Args:
        held: ``[T, W]`` bool.
        page_size: tokens of a page; a multiple of the blocks that compete.
    """

    held: torch.Tensor
    page_size: int

    def has(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether the keys at positions ``[T, Hkv, n]`` are here; past the table's end: no."""
        page = positions // self.page_size
        beyond = page >= self.held.shape[1]
        rows = self.held[:, None].expand(-1, positions.shape[1], -1)
        return rows.gather(2, page.masked_fill(beyond, 0)) & ~beyond

    def complete(
        self,
        values: torch.Tensor,
        blocks: torch.Tensor,
        size: int,
        largest: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Values of blocks, each from the rank that holds the block.

        Args:
            values: ``[T, Hkv, ..., n]``; a block of another rank may have any value.
            blocks: ``[T, Hkv, n]`` int64 blocks of ``size`` tokens.
            largest: elementwise maximum of a contiguous tensor over the ranks.
        """
        missing = ~self.has(blocks * size)
        while missing.dim() < values.dim():
            missing = missing.unsqueeze(2)
        return largest(values.masked_fill(missing, float("-inf")).contiguous())

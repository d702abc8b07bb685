"""Which pages a rank holds, where several ranks hold a sequence's pages between them."""

from __future__ import annotations

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

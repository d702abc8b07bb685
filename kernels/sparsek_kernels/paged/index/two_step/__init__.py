"""Prefill tiles in two steps: candidates by means of keys, then exact block probabilities."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.two_step import cpu
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


class TwoStep(Indexer):
    """A tile's blocks are drawn by the largest probability that one of its sampled queries gives.

    Means of 16 keys decide which candidates are drawn; probabilities of these are of the keys
    themselves.  The rule is docs/selection.md.

    Args:
        kept: gets the candidates of steps, ``[tiles, Hkv, listed_blocks]`` int32 entries each, for
            checks: rows of tiles that see everything have no meaning.
    """

    per_token: ClassVar[bool | None] = False
    replayable: ClassVar[bool] = True
    grows: ClassVar[bool] = True

    def __init__(self, kept: list[torch.Tensor] | None = None) -> None:
        self.kept = kept

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each tile's blocks; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment, self.kept))
        from sparsek_kernels.paged.index.two_step import launch

        return Chosen(launch.select(operands, segment, self.kept))

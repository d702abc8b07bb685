"""Prefill tiles by scores of whole blocks: what some queries give to means of their keys."""

from __future__ import annotations

from typing import ClassVar

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.block_scores import cpu
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


class BlockScores(Indexer):
    """A tile's blocks rank by the probabilities that its sampled queries give to means of 16 keys.

    The rule is docs/selection.md.
    """

    per_token: ClassVar[bool | None] = False

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each tile's blocks; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment))
        from sparsek_kernels.paged.index.block_scores import launch

        return Chosen(launch.select(operands, segment))

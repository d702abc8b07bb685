"""Prefill tiles: blocks drawn by means of keys."""

from __future__ import annotations

from typing import ClassVar

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.cell_means import cpu
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


class CellMeans(Indexer):
    """A tile's blocks are drawn by what its sampled queries give to means of 16 keys.

    The rule is docs/selection.md.
    """

    per_token: ClassVar[bool | None] = False
    replayable: ClassVar[bool] = True

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each tile's blocks; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment))
        from sparsek_kernels.paged.index.cell_means import launch

        return Chosen(launch.select(operands, segment))

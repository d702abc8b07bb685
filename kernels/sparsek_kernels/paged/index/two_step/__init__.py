"""Prefill tiles in two steps: candidates by means of keys, then exact block probabilities."""

from __future__ import annotations

from typing import ClassVar

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.two_step import cpu
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


class TwoStep(Indexer):
    """A tile's blocks rank by the largest probability that one of its sampled queries gives them.

    Means of 16 keys name the candidates; probabilities of these are of the keys themselves.  The
    rule is docs/selection.md.
    """

    per_token: ClassVar[bool | None] = False
    replayable: ClassVar[bool] = True

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each tile's blocks; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment))
        from sparsek_kernels.paged.index.two_step import launch

        return Chosen(launch.select(operands, segment))

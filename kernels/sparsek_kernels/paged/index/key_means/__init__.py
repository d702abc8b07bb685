"""Decoded tokens by quantised means of 4 keys, which pages keep (``sketch.py``)."""

from __future__ import annotations

from typing import ClassVar

from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.key_means import cpu
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


class KeyMeans(Indexer):
    """A token's cells rank by the probabilities of their best means, summed over the GQA group.

    The rule is docs/selection.md.  On a CPU with a C compiler, choosing and attending are one call.
    """

    per_token: ClassVar[bool | None] = True
    reads_pages: ClassVar[bool] = True
    written_with_keys: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    shares_context: ClassVar[bool] = True

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each token's cells; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment))
        from sparsek_kernels.paged.index.key_means import launch

        return Chosen(launch.select(operands, segment))

    def fused_decode(self, operands: PagedOperands, segment: Segment) -> bool:
        """Decode by the C function where it takes these tensors."""
        if operands.ranks is not None or not native_decode.supports(operands, segment.batch):
            return False
        tokens = slice(sum(segment.batch.query_lens))
        native_decode.decode(operands.of_rows(tokens), segment.batch, segment.policy)
        return True

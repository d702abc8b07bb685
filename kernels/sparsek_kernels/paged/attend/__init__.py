"""The half of sparse attention that attends: it takes what is chosen and knows no rule."""

from __future__ import annotations

from sparsek_kernels.paged.attend import cpu, cpu_shards
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment


def attend(operands: PagedOperands, segment: Segment, chosen: Chosen | None = None) -> None:
    """Write the attention of a segment's queries to ``operands.out``.

    Args:
        operands: queries, pages and output; with ``lse`` the pages of one rank, whose log-sum-exp
            is then written too.
        segment: the queries, and the sinks and window that they attend in any case.
        chosen: the blocks that each tile attends beyond these (:meth:`Indexer.select`); ``None``
            where the policy has no slots for any.

    Raises:
        TypeError: ``chosen`` is something else.
    """
    if chosen is not None and not isinstance(chosen, Chosen):
        raise TypeError(f"chosen: expected Chosen(indices), got {type(chosen).__name__}")
    if operands.q.is_cuda:
        from sparsek_kernels.paged.attend import launch

        launch.attend_segment(operands, segment, chosen)
    elif operands.lse is not None:
        cpu_shards.attend_segment(operands, segment, chosen)
    else:
        cpu.attend_segment(operands, segment, chosen)

"""The half of sparse attention that attends: it takes what is chosen and knows no rule."""

from __future__ import annotations

from sparsek_kernels.paged.attend import cpu, cpu_shards
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.record import SEGMENT


def attend(operands: PagedOperands, segment: Segment, chosen: Chosen | None = None) -> None:
    """Write the attention of a segment's queries to ``operands.out``.

    Args:
        operands: queries, pages and output; with ``lse`` the pages of one rank, whose log-sum-exp
            is then written too.
        segment: the queries, and the sinks and window that they attend in any case.
        chosen: the blocks that each tile attends beyond these, and what stands in for the others
            (:meth:`Indexer.select`); ``None`` where the policy has no slots for any.

    Raises:
        TypeError, ValueError: ``chosen`` is something else, or has a tail where tokens share tiles,
            pages do not hold segments whole, or V is not as wide as K.
    """
    _check_chosen(operands, segment, chosen)
    if operands.q.is_cuda:
        from sparsek_kernels.paged.attend import launch

        launch.attend_segment(operands, segment, chosen)
    elif operands.lse is not None:
        cpu_shards.attend_segment(operands, segment, chosen)
    else:
        cpu.attend_segment(operands, segment, chosen)


def _check_chosen(operands: PagedOperands, segment: Segment, chosen: Chosen | None) -> None:
    if chosen is None:
        return
    if not isinstance(chosen, Chosen):
        raise TypeError(f"chosen: expected Chosen(indices, tail), got {type(chosen).__name__}")
    if chosen.tail is None:
        return
    policy, widths = segment.policy, (operands.k_cache.shape[3], operands.v_cache.shape[3])
    if not policy.alignment or operands.page_size % SEGMENT or len(set(widths)) > 1:
        raise ValueError(
            f"chosen.tail: expected a policy with an alignment, pages of a multiple of {SEGMENT} "
            f"tokens and V as wide as K, got alignment={policy.alignment}, "
            f"page_size={operands.page_size} and {widths}"
        )

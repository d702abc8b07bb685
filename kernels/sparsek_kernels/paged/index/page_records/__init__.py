"""Single tokens by the records that pages keep of their segments (``record.py``)."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparsek_kernels.paged.checks import check_summary
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.page_records.cpu_write import write_records_eager
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL, SEGMENT, SelectionPolicy
from sparsek_kernels.paged.record import page_bytes


class PageRecords(Indexer):
    """Cells of 2 keys are drawn, the more probably the more their vectors weigh.

    Scores are summed over a request's new tokens and the group, so that its tokens share a list.

    ``write_kv`` writes a record once its segment of 64 tokens is complete, and again where the last
    one of them is.  The rule is docs/selection.md.
    """

    per_token: ClassVar[bool | None] = True
    reads_pages: ClassVar[bool] = True
    written_with_keys: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    shares_context: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    aligned: ClassVar[bool] = True

    def page_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of a page's records, for one KV head."""
        return page_bytes(page_size, head_dim)

    def check(
        self, policy: SelectionPolicy, k_cache: torch.Tensor, num_heads: int | None = None
    ) -> None:
        """Check that pages hold whole segments, and the policy pairs of keys between them."""
        super().check(policy, k_cache, num_heads)
        if (policy.alignment, policy.sel_block_size) != (SEGMENT, CELL):
            raise ValueError(
                f"policy: expected alignment {SEGMENT} and sel_block_size {CELL} with "
                f"{type(self).__name__} (SelectionPolicy.by_records), got {policy.alignment} and "
                f"{policy.sel_block_size}"
            )
        page_bytes(*k_cache.shape[2:])

    def check_pages(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k_summary: torch.Tensor
    ) -> None:
        """Check that pages have room for records, and that V is as wide as K.

        Raises:
            TypeError, ValueError, NotImplementedError: they have not, or it is not.
        """
        check_summary(k_summary, k_cache, self.page_bytes(*k_cache.shape[2:]))
        if v_cache.shape[-1] != k_cache.shape[-1]:
            raise ValueError(
                f"v_cache: expected rows as wide as those of K, {k_cache.shape[-1]}, with "
                f"{type(self).__name__}, got {v_cache.shape[-1]}; pad V with zeros"
            )

    def fused_decode(self, operands: PagedOperands, segment: Segment) -> bool:
        """Decode by the C function where it takes these tensors."""
        if operands.q.is_cuda or operands.ranks is not None:
            return False
        counts = segment.batch.query_lens
        if not native_decode.supports(operands, segment.batch, max(counts, default=1)):
            return False
        tokens = slice(sum(counts))
        native_decode.decode(operands.of_rows(tokens), segment.batch, segment.policy)
        return True

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each request's sample of cells (``sample.py``).

        Raises:
            ValueError: the tokens are a prompt's, not yet told apart.
        """
        if not segment.decodes:
            raise ValueError(
                f"segment: expected tokens that are decoded alone with {type(self).__name__}, got "
                "a prompt's; plan the step by plan_step()"
            )
        if not operands.q.is_cuda:
            from sparsek_kernels.paged.index.page_records import cpu

            return cpu.select(operands, segment)
        from sparsek_kernels.paged.index.page_records import launch

        return launch.select(operands, segment)


def write_records(k_cache: torch.Tensor, k_summary: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the records of the segments that end at some slots, whose keys are there.

    Args:
        k_cache: ``[num_pages, Hkv, page_size, D]``.
        k_summary: ``[num_pages, Hkv, bytes]`` uint8, written.
        slots: ``[T]`` int64, none twice; -1 marks padding.
    """
    if not k_cache.is_cuda:
        write_records_eager(k_cache, k_summary, slots)
        return
    from sparsek_kernels.paged.index.page_records import launch_write

    launch_write.write_records(k_cache, k_summary, slots)

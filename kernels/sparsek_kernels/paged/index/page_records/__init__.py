"""Single tokens by the records that pages keep of their segments (``record.py``)."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.page_records.cpu_write import write_records_eager
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL, SEGMENT, SelectionPolicy
from sparsek_kernels.paged.record import page_bytes


class PageRecords(Indexer):
    """A token's cells of 2 keys rank by the probabilities of their vectors, summed over the group.

    Records are written once their segment of 64 tokens is complete, and again where its last token
    is.  The rule is docs/selection.md.
    """

    per_token: ClassVar[bool | None] = True
    reads_pages: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    shares_context: ClassVar[bool] = True
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

    def write(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_summary: torch.Tensor,
        batch: PagedBatch,
        policy: SelectionPolicy,
    ) -> None:
        """Keep the records of the segments that the new tokens complete."""
        if v_cache.shape[-1] != k_cache.shape[-1]:
            raise ValueError(
                f"v_cache: expected rows as wide as those of K, {k_cache.shape[-1]}, with "
                f"{type(self).__name__}, got {v_cache.shape[-1]}; pad V with zeros"
            )
        if not k_cache.is_cuda:
            write_records_eager(k_cache, v_cache, k_summary, batch)
            return
        from sparsek_kernels.paged.index.page_records import launch_write

        launch_write.write_records(k_cache, v_cache, k_summary, batch)

    def fused_decode(self, operands: PagedOperands, segment: Segment) -> bool:
        """Decode by the C function where it takes these tensors."""
        if operands.ranks is not None or not native_decode.supports(operands, segment.batch):
            return False
        tokens = slice(sum(segment.batch.query_lens))
        native_decode.decode(operands.of_rows(tokens), segment.batch, segment.policy)
        return True

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each token's cells, and what stands in for the others.

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

"""Single tokens by InfLLM-v2's own scores (arXiv 2509.24663), as MiniCPM4 was trained."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.infllm import cpu
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy


class InfLLM(Indexer):
    """A token's blocks rank by the largest softmax share of a mean of 32 keys that touches them.

    Pages keep means of 16 keys on a GPU; a CPU scores the keys themselves.  Means and queries are
    without positions where the batch has a ``rotation`` (``use_nope``).
    """

    per_token: ClassVar[bool | None] = True
    reads_pages: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def write(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_summary: torch.Tensor,
        batch: PagedBatch,
        policy: SelectionPolicy,
    ) -> None:
        """Keep the means of the cells that the new tokens complete; nothing on a CPU."""
        if k_cache.is_cuda:
            from sparsek_kernels.paged.index.infllm import launch

            launch.write_means(k_cache, k_summary, batch)

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each token's blocks; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment))
        from sparsek_kernels.paged.index.infllm import launch

        return Chosen(launch.select(operands, segment))

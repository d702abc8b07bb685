"""Single tokens by SeerAttention-R's gates (arXiv 2506.08889, section 3)."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.seer import cpu
from sparsek_kernels.paged.index.seer.gates import SMALLEST_GATED, Gates, check_gates
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy


class Seer(Indexer):
    """A token's blocks rank by the product of its gate query and their gate keys.

    Pages keep a gate key of each complete block.  Queries and keys are without positions where the
    batch has a ``rotation``; gate queries and keys are then turned by it.

    Args:
        gates: of the layer.
    """

    per_token: ClassVar[bool | None] = True
    reads_pages: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def __init__(self, gates: Gates) -> None:
        self.gates = gates

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The gates."""
        return self.gates.tensors

    def check(
        self, policy: SelectionPolicy, k_cache: torch.Tensor, num_heads: int | None = None
    ) -> None:
        """Check that gates fit the pages, and the pages the blocks."""
        super().check(policy, k_cache, num_heads)
        size, page_size = policy.sel_block_size, k_cache.shape[2]
        if size < SMALLEST_GATED:
            raise ValueError(
                f"policy: expected sel_block_size of at least {SMALLEST_GATED} with gates, got "
                f"{size}"
            )
        if page_size % size:
            raise ValueError(
                f"page_size: expected a multiple of sel_block_size={size} with gates, got "
                f"{page_size}"
            )
        check_gates(self.gates, k_cache, num_heads)

    def write(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_summary: torch.Tensor,
        batch: PagedBatch,
        policy: SelectionPolicy,
    ) -> None:
        """Keep the gate keys of the blocks that the new tokens complete."""
        if not k_cache.is_cuda:
            cpu.write_gate_keys_eager(k_cache, k_summary, batch, policy.sel_block_size, self.gates)
            return
        from sparsek_kernels.paged.index.seer import launch

        launch.write_gate_keys(k_cache, k_summary, batch, policy.sel_block_size, self.gates)

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return each token's blocks; see :meth:`Indexer.select`."""
        if not operands.q.is_cuda:
            return Chosen(cpu.select(operands, segment, self.gates))
        from sparsek_kernels.paged.index.seer import launch

        return Chosen(launch.select(operands, segment, self.gates))

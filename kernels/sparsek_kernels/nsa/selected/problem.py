"""One problem of selected attention: its tensors and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsek_kernels.nsa.config import ProblemShape


@dataclass(frozen=True)
class SelectedProblem:
    """Causal attention inside chosen blocks (arXiv 2502.11089, section 3.3.2).

    Args:
        q: ``[B, N, Hq, D]``, the last N tokens of M.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        block_indices: ``[B, N, Hkv, S]`` int32 blocks of the token's sequence, -1 for none.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences, with B = 1 and N = M.
        sel_block_size: tokens of a block.
        softmax_scale: factor of ``q . k``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_indices: torch.Tensor
    cu_seqlens: torch.Tensor | None
    sel_block_size: int
    softmax_scale: float

    @cached_property
    def shape(self) -> ProblemShape:
        """Sizes of ``q`` and ``k``."""
        batch, num_q, num_heads, head_dim = self.q.shape
        return ProblemShape(batch, num_q, self.k.shape[1], num_heads, self.k.shape[2], head_dim)

    @cached_property
    def indices(self) -> torch.Tensor:
        """``block_indices``, contiguous."""
        return self.block_indices.contiguous()

    @property
    def top_n(self) -> int:
        """Blocks per token, S."""
        return int(self.block_indices.shape[3])

    @property
    def packed(self) -> bool:
        """Whether ``cu_seqlens`` packs several sequences into one."""
        return self.cu_seqlens is not None

    @property
    def offset(self) -> int:
        """Position of the first query in its sequence, M - N."""
        return 0 if self.packed else self.shape.num_k - self.shape.num_q

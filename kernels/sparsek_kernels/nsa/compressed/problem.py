"""Tensors, settings and sizes of one call of compressed attention, or of its selection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsek_kernels.common.operators import make_contiguous
from sparsek_kernels.nsa.config import LaunchConfig, ProblemShape, launch_config
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from sparsek_kernels.nsa.spec import NSASpec


@dataclass(frozen=True, eq=False)
class CompressedProblem:
    """Checked inputs of one call, as ``compressed_attention`` names them.

    ``cu_seqlens`` are made contiguous.  Selection does not read ``v_cmp``; ``tuned`` are launch
    parameters instead of the table's.
    """

    q: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    seq_len: int
    cu_seqlens: torch.Tensor | None
    spec: NSASpec
    softmax_scale: float
    tuned: LaunchConfig | None = None

    def __post_init__(self) -> None:
        make_contiguous(self, "cu_seqlens")

    @cached_property
    def shape(self) -> ProblemShape:
        """Sizes, as the table of launch parameters takes them."""
        return ProblemShape.of(self.q, self.seq_len, self.k_cmp.shape[2])

    @cached_property
    def config(self) -> LaunchConfig:
        """Launch parameters."""
        return self.tuned or launch_config(self.q, self.shape, self.spec.top_n)

    @property
    def offset(self) -> int:
        """Position of the first query; packed sequences start at 0."""
        return self.seq_len - self.q.shape[1]

    @cached_property
    def cu_cmp(self) -> torch.Tensor | None:
        """``[sequences + 1]`` int32 offsets of packed sequences' compressed blocks."""
        if self.cu_seqlens is None:
            return None
        return compressed_cu_seqlens(
            self.cu_seqlens, self.spec.cmp_block_size, self.spec.cmp_stride
        )

    @cached_property
    def token_seq(self) -> torch.Tensor | None:
        """``[N]`` int32: the packed sequence of each token."""
        if self.cu_seqlens is None:
            return None
        row = torch.arange(self.q.shape[1], dtype=torch.int32, device=self.q.device)
        return torch.searchsorted(self.cu_seqlens[1:], row, right=True, out_int32=True)

    @property
    def rules(self) -> dict[str, int | bool]:
        """Compile-time arguments that every kernel of this problem takes."""
        return {
            "GROUP": self.shape.group,
            "HEAD_DIM": self.shape.head_dim,
            "CMP_BLOCK": self.spec.cmp_block_size,
            "CMP_STRIDE": self.spec.cmp_stride,
            "VARLEN": self.cu_seqlens is not None,
        }

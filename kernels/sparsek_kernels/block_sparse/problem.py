"""One block-sparse attention call, as launchers and the torch path take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsek_kernels.block_sparse.config import LaunchConfig, ProblemShape, select_config
from sparsek_kernels.common.device import device_arch
from sparsek_kernels.common.dropout import LEVELS, drop_threshold
from sparsek_kernels.common.operators import make_contiguous


@dataclass(frozen=True, eq=False)
class BlockSparseProblem:
    """Checked inputs of one call, as ``block_sparse_attention`` and ``BlockStructure`` name them.

    Without dropout there is no ``rng_state``; it is made contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    ccol_indices: torch.Tensor
    row_indices: torch.Tensor
    block_size: int
    causal: bool
    softmax_scale: float
    key_mask: torch.Tensor | None = None
    query_mask: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        make_contiguous(self, "rng_state")

    @cached_property
    def shape(self) -> ProblemShape:
        """Sizes, from which the launch configuration follows."""
        return ProblemShape(
            num_heads=self.q.shape[2],
            num_kv_heads=self.k.shape[2],
            head_dim=self.q.shape[3],
            block_size=self.block_size,
            num_patterns=self.crow_indices.shape[0],
            num_k=self.k.shape[1],
            masked=self.key_mask is not None or self.query_mask is not None,
            dropout=self.drop_below > 0,
        )

    @property
    def drop_below(self) -> int:
        """Random bits below which a weight is dropped; 0 without dropout."""
        return 0 if self.rng_state is None else drop_threshold(self.dropout_p)

    @property
    def keep_scale(self) -> float:
        """Factor of the weights that stay, by which their expected sum is 1."""
        return LEVELS / (LEVELS - self.drop_below)

    def launch_config(self) -> LaunchConfig:
        """The table's configuration for these inputs on their GPU."""
        return select_config(self.shape, self.q.dtype, device_arch(self.q.device))

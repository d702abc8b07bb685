"""``torch.library`` operators of block-sparse attention; the columns serve the gradient."""

from __future__ import annotations

import torch

from sparsek_kernels.block_sparse import torch_path
from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common.operators import Passes, attention_operators, runs_kernels


def _passes(x: torch.Tensor) -> Passes:
    if runs_kernels(x):
        from sparsek_kernels.block_sparse import launch

        return launch.forward, launch.backward
    return torch_path.forward, torch_path.backward


block_sparse_fwd, block_sparse_bwd = attention_operators(
    "block_sparse",
    "Tensor crow_indices, Tensor col_indices, Tensor ccol_indices, Tensor row_indices, "
    "SymInt block_size, bool causal, float softmax_scale, Tensor? key_mask=None, "
    "Tensor? query_mask=None, Tensor? rng_state=None, float dropout_p=0.0",
    BlockSparseProblem,
    _passes,
)

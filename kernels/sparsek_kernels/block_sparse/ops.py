"""``torch.library`` operators of block-sparse attention, with fakes and autograd."""

from __future__ import annotations

import torch

from sparsek_kernels.block_sparse import torch_path
from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common.operators import new_like, new_lse, register_attention, runs_kernels


@torch.library.custom_op("sparsek::block_sparse_fwd", mutates_args=())
def block_sparse_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    ccol_indices: torch.Tensor,
    row_indices: torch.Tensor,
    block_size: int,
    causal: bool,
    softmax_scale: float,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]``; the columns serve the gradient."""
    indices = (crow_indices, col_indices, ccol_indices, row_indices)
    options = (key_mask, query_mask, rng_state, dropout_p)
    problem = BlockSparseProblem(q, k, v, *indices, block_size, causal, softmax_scale, *options)
    out, lse = new_like(q), new_lse(q)
    if runs_kernels(q):
        from sparsek_kernels.block_sparse import launch

        with torch.cuda.device(q.device):
            launch.forward(problem, out, lse)
    else:
        torch_path.forward(problem, out, lse)
    return out, lse


@torch.library.custom_op("sparsek::block_sparse_bwd", mutates_args=())
def block_sparse_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    ccol_indices: torch.Tensor,
    row_indices: torch.Tensor,
    block_size: int,
    causal: bool,
    softmax_scale: float,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    indices = (crow_indices, col_indices, ccol_indices, row_indices)
    options = (key_mask, query_mask, rng_state, dropout_p)
    problem = BlockSparseProblem(q, k, v, *indices, block_size, causal, softmax_scale, *options)
    if runs_kernels(q):
        from sparsek_kernels.block_sparse import launch

        with torch.cuda.device(q.device):
            return launch.backward(problem, out, lse, dout, dlse)
    return torch_path.backward(problem, out, lse, dout, dlse)


register_attention(block_sparse_fwd, block_sparse_bwd)

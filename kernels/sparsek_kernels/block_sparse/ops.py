"""``torch.library`` operators of block-sparse attention, with fakes and autograd."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.block_sparse.torch_path import torch_backward, torch_forward
from sparsek_kernels.checks import FLOAT_DTYPES


def runs_kernels(q: torch.Tensor) -> bool:
    """Whether Triton kernels take these inputs (else torch operations do)."""
    return q.is_cuda and q.dtype in FLOAT_DTYPES


def empty_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]``, contiguous."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    return q.new_empty(q.shape), lse


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, N, Hq, D]`` and log-sum-exp ``[B, Hq, N]``; the columns serve the gradient."""
    out, lse = empty_outputs(q)
    scalars = (block_size, causal, softmax_scale)
    if runs_kernels(q):
        from sparsek_kernels.block_sparse.launch import launch_forward

        with torch.cuda.device(q.device):
            launch_forward(out, lse, q, k, v, crow_indices, col_indices, *scalars)
    else:
        torch_forward(out, lse, q, k, v, crow_indices, col_indices, *scalars)
    return out, lse


@block_sparse_fwd.register_fake
def _(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_outputs(q)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    inputs = (dout, dlse, q, k, v, out, lse, crow_indices, col_indices)
    scalars = (block_size, causal, softmax_scale)
    if runs_kernels(q):
        from sparsek_kernels.block_sparse.launch import launch_backward

        with torch.cuda.device(q.device):
            return launch_backward(*inputs, ccol_indices, row_indices, *scalars)
    return torch_backward(*inputs, *scalars)


@block_sparse_bwd.register_fake
def _(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *indices = inputs[:7]
    ctx.save_for_backward(q, k, v, *output, *indices)
    ctx.scalars = inputs[7:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * 10
    if dout is None:
        dout = torch.zeros_like(ctx.saved_tensors[3])
    grads = block_sparse_bwd(dout, dlse, *ctx.saved_tensors, *ctx.scalars)
    return (*grads, *(None,) * 7)


block_sparse_fwd.register_autograd(_backward, setup_context=_setup_context)

"""Launches of mean pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv
from sparsek_kernels.nsa.compress.kernels.mean_pool import (
    nsa_mean_pool_bwd_kernel,
    nsa_mean_pool_fwd_kernel,
)
from sparsek_kernels.nsa.compress.mlp import stride_starts
from sparsek_kernels.nsa.config import row_tile
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from sparsek_kernels.nsa.spec import NSASpec


def mean_pool_forward(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
) -> None:
    """Fill each contiguous ``[B, C, Hkv, D]`` of ``outs`` with means of blocks of ``xs``."""
    batch, num_cmp, num_heads, head_dim = outs[0].shape
    if outs[0].numel() == 0:
        return
    starts = xs[0]
    if cu_seqlens is not None:
        first, used = stride_starts(cu_seqlens, num_cmp, spec)
        starts = torch.where(used, first, -1).to(torch.int32)
    _, block_d = row_tile(head_dim)
    block_c = max(1024 // block_d, 1)
    for x, out in zip(xs, outs, strict=True):
        run(
            nsa_mean_pool_fwd_kernel, (cdiv(num_cmp, block_c), num_heads, batch),
            out, x, starts,
            *x.stride(),
            num_cmp, num_heads,
            HEAD_DIM=head_dim, CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride,
            VARLEN=cu_seqlens is not None, BLOCK_C=block_c, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip


def mean_pool_backward(
    douts: Sequence[torch.Tensor],
    dxs: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
) -> None:
    """Fill each contiguous ``[B, M, Hkv, D]`` of ``dxs`` from ``[B, C, Hkv, D]`` of ``douts``."""
    batch, num_tokens, num_heads, head_dim = dxs[0].shape
    if dxs[0].numel() == 0:
        return
    token_seq = cu = cu_cmp = dxs[0]
    if cu_seqlens is not None:
        cu = cu_seqlens.contiguous()
        cu_cmp = compressed_cu_seqlens(cu, spec.cmp_block_size, spec.cmp_stride)
        token = torch.arange(num_tokens, dtype=torch.int32, device=cu.device)
        token_seq = torch.searchsorted(cu[1:], token, right=True, out_int32=True)
    block_t, block_d = row_tile(head_dim)
    for dout, dx in zip(douts, dxs, strict=True):
        run(
            nsa_mean_pool_bwd_kernel, (cdiv(num_tokens, block_t), num_heads, batch),
            dx, dout, token_seq, cu, cu_cmp,
            *dout.stride(),
            num_tokens, dout.shape[1], num_heads,
            HEAD_DIM=head_dim, CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride,
            VARLEN=cu_seqlens is not None, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip

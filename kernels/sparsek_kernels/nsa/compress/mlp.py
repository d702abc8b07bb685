"""The paper's learnable compression as matrix products over strides, differentiable.

Overlapping blocks share their strides.  With ``W1`` cut into ``l / d`` parts, a block's first
layer is the sum of its strides' products with the parts, so every stride is read and multiplied
once and no block is ever unfolded:

    h_c = gelu(sum_p x[c + p] @ W1[p] + (vec(position) @ W1 + b1)),   y_c = h_c @ W2 + b2
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from sparsek_kernels.nsa.spec import NSASpec


class PhiWeights(NamedTuple):
    """Weights of the learnable map of equation 7, shared by all KV heads.

    Args:
        position: ``[l, D]`` encoding of the place inside a block, added to each token.
        w1: ``[l * D, F]``, rows ordered token by token.
        b1: ``[F]``.
        w2: ``[F, D]``.
        b2: ``[D]``.
    """

    position: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor


def stride_starts(
    cu_seqlens: torch.Tensor, rows: int, spec: NSASpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """First token of each compressed row of a packed batch, and whether the row is used."""
    offsets = compressed_cu_seqlens(cu_seqlens, spec.cmp_block_size, spec.cmp_stride)
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    seq = torch.searchsorted(offsets[1:], row, right=True)
    used = seq < offsets.shape[0] - 1
    seq = seq.clamp(max=offsets.shape[0] - 2)
    start = cu_seqlens[seq] + (row - offsets[seq]) * spec.cmp_stride
    return torch.where(used, start, 0).long(), used


def phi_compress(
    x: torch.Tensor, weights: PhiWeights, cu_seqlens: torch.Tensor | None, spec: NSASpec
) -> torch.Tensor:
    """Compressed ``[B, C, Hkv, D]`` of ``x [B, M, Hkv, D]``; rows past the last block are zero."""
    batch, num_tokens, num_heads, dim = x.shape
    stride, parts = spec.cmp_stride, spec.strides_per_cmp
    hidden = weights.w1.shape[1]
    by_part = weights.w1.view(parts, stride * dim, hidden)
    constant = weights.position.reshape(1, -1) @ weights.w1 + weights.b1  # [1, F]
    # Inductor fails on products of no rows where a symbol says how many: ``or 0`` is a number.
    if cu_seqlens is None:
        rows = spec.num_compressed(num_tokens) or 0
        strides = x[:, : (rows + parts - 1) * stride] if rows else x[:, :0]
        strides = strides.unflatten(1, (-1, stride)).transpose(2, 3).flatten(3)  # [B, -, Hkv, d D]
        total = constant.expand(batch, rows, num_heads, hidden)
        for part in range(parts):
            total = total + strides[:, part : part + rows] @ by_part[part]
    else:
        start, used = stride_starts(cu_seqlens, num_tokens // stride or 0, spec)
        within = torch.arange(stride, device=x.device)
        total = constant.expand(batch, start.shape[0], num_heads, hidden)
        for part in range(parts):
            token = (start[:, None] + part * stride + within).clamp(max=num_tokens - 1)
            strides = x[:, token].transpose(2, 3).flatten(3)
            total = total + strides @ by_part[part]
    out = torch.nn.functional.gelu(total) @ weights.w2 + weights.b2
    if cu_seqlens is not None:
        out = out * used[None, :, None, None].to(out.dtype)
    return out

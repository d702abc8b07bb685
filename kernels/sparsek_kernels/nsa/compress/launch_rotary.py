"""Launches of the rotary embedding."""

from __future__ import annotations

import torch

from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv, next_power_of_2
from sparsek_kernels.nsa.compress.kernels.rotary import nsa_rotary_kernel

_TILE = 4096  # pairs of a program: its angles are computed once for all of its heads


def rotate_into(
    out: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, sign: int
) -> None:
    """Fill contiguous ``out [B, N, H, D]`` with ``x`` rotated by ``sign * positions``."""
    if out.numel() == 0:
        return
    batch, num_tokens, num_heads, head_dim = x.shape
    positions = positions.expand(batch, num_tokens)
    half = head_dim // 2
    block_d = next_power_of_2(half)
    block_h = min(next_power_of_2(num_heads), max(_TILE // block_d, 1))
    block_t = min(max(_TILE // (block_d * block_h), 1), next_power_of_2(num_tokens))
    run(
        nsa_rotary_kernel, (cdiv(num_tokens, block_t), cdiv(num_heads, block_h), batch),
        out, x, positions, freqs,
        *x.stride(), *positions.stride(), num_tokens, num_heads, sign,
        HALF=half, BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip

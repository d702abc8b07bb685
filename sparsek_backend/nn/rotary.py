"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Llama checkpoints."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` by ``position * theta ** (-2 i / D)``.

    Args:
        x: ``[B, N, H, D]``, D even, any floating dtype; angles are computed in fp32 (fp64 for
            fp64 inputs).
        positions: ``[N]`` or ``[B, N]`` integers.
        theta: base of the frequencies.

    Returns:
        The rotated tensor in the dtype of ``x``.
    """
    half = x.shape[-1] // 2
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    index = torch.arange(half, device=x.device, dtype=compute)
    frequency = torch.pow(torch.tensor(theta, dtype=compute, device=x.device), -index / half)
    angle = positions.to(compute)[..., None] * frequency  # [(B,) N, D / 2]
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = x.to(compute).split(half, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)

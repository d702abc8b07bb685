"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Llama checkpoints."""

from __future__ import annotations

import torch


def rotary_frequencies(
    head_dim: int,
    theta: float,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Angle per position of each pair: ``theta ** (-2 i / D)``, ``[D / 2]``.

    Args:
        head_dim: elements of a head, D, even.
        theta: base of the frequencies.
        dtype: fp32, or fp64 for fp64 inputs.
        device: where the result lives.
    """
    half = head_dim // 2
    index = torch.arange(half, device=device, dtype=dtype)
    return torch.pow(torch.tensor(theta, dtype=dtype, device=device), -index / half)


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` by ``position * frequencies[i]``.

    Args:
        x: ``[B, N, H, D]``, any floating dtype; computed in the dtype of ``frequencies``.
        positions: ``[N]`` or ``[B, N]`` integers; negative ones rotate back.
        frequencies: ``[D / 2]`` of :func:`rotary_frequencies`.

    Returns:
        The rotated tensor in the dtype of ``x``.
    """
    compute = frequencies.dtype
    angle = positions.to(compute)[..., None] * frequencies  # [(B,) N, D / 2]
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = x.to(compute).split(x.shape[-1] // 2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)

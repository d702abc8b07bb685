"""Turning queries and keys by their positions, and back, in torch (RoPE).

``rotation`` is a table ``[positions, D]`` float32 of D/2 cosines, then as many sines.
"""

from __future__ import annotations

import torch


def unrotated(
    x: torch.Tensor, rotation: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """``[n, heads, ..., D]`` float32 as it was before its positions ``[n]`` turned it.

    Without a rotation it is as it is; positions past the table are undefined.
    """
    if rotation is None:
        return x
    turns = rotation[positions.clamp(max=rotation.shape[0] - 1)]
    cos, sin = turns.view(-1, *(1,) * (x.dim() - 2), x.shape[-1]).chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    back = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
    return back / (cos.square() + sin.square()).repeat(*(1,) * (x.dim() - 1), 2)


def rotated(
    x: torch.Tensor, rotation: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """``[n, heads, D]`` float32 turned by its positions ``[n]``; as it is without a rotation."""
    if rotation is None:
        return x
    cos, sin = rotation[positions.clamp(max=rotation.shape[0] - 1)].unsqueeze(1).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

"""Queries as the GPU kernels score the sketch with them."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.index.key_means.sketch import rotate


def rounded(q: torch.Tensor) -> torch.Tensor:
    """Queries ``[..., D]`` after rotation, rounding to 8 bits and rotation back; float32."""
    turned = rotate(q.float())
    scale = turned.abs().amax(-1, keepdim=True) / 127.0
    levels = torch.floor(turned / torch.where(scale > 0.0, scale, 1.0) + 0.5)
    return rotate(levels * scale)  # the rotation is its own inverse

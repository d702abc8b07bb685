"""Rotary position embedding of layers, by the base of its frequencies."""

from __future__ import annotations

import torch

from sparsek_kernels.nsa.compress.rotary import rotary_frequencies
from sparsek_kernels.nsa.compress.rotary import rotate as rotate_by


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` by ``position * theta ** (-2 i / D)``.

    Args:
        x: ``[B, N, H, D]``, D even, any floating dtype; angles are computed in fp32 (fp64 for
            fp64 inputs).
        theta: base of the frequencies.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequencies = rotary_frequencies(x.shape[-1], theta, dtype=compute, device=x.device)
    return rotate_by(x, positions, frequencies)

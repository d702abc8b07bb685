"""Rotary position embedding of layers, by the base of its frequencies."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import captures, plain
from sparsek_kernels.nsa.compress.rotary import rotary_frequencies
from sparsek_kernels.nsa.compress.rotary import rotate as rotate_by

_known: dict[tuple[int, float, torch.dtype, torch.device], torch.Tensor] = {}


def _frequencies(
    head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The frequencies, computed once for all layers."""
    key = (head_dim, theta, dtype, device)
    if key in _known:
        return _known[key]
    with torch.inference_mode(mode=False):  # a later call may need gradients
        found = rotary_frequencies(head_dim, theta, dtype=dtype, device=device)
    if not captures(device):  # a CUDA graph has its own memory, which it writes again
        if device.type == "cuda":  # once: other streams read them too
            torch.cuda.current_stream(device).synchronize()
        _known[key] = found
    return found


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` by ``position * theta ** (-2 i / D)``.

    Args:
        x: ``[B, N, H, D]``, D even, any floating dtype; angles are computed in fp32 (fp64 for
            fp64 inputs).
        theta: base of the frequencies.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    if plain(x):
        return rotate_by(x, positions, _frequencies(x.shape[-1], theta, compute, x.device))
    frequencies = rotary_frequencies(x.shape[-1], theta, dtype=compute, device=x.device)
    return rotate_by(x, positions, frequencies)

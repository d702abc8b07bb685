"""Oracle of the key means and of the tokens that choose by them, in float64."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.index.reference import block_scores_reference, means_reference
from sparsek_kernels.paged.policy import SelectionPolicy

VECTOR_SIZE = 4
"""Tokens whose keys share one vector of the sketch."""


def hadamard_reference(dim: int) -> torch.Tensor:
    """Rotation ``[D, D]`` float64: normalised Hadamard matrices, as large as divide ``D``."""
    size = dim & -dim
    i = torch.arange(dim)
    bits = (i[:, None] % size) & (i % size)
    odd = torch.stack([bits >> b & 1 for b in range(size.bit_length())]).sum(0) % 2
    together = i[:, None] // size == i // size
    return torch.where(together, (1.0 - 2.0 * odd.double()) * size**-0.5, 0.0)


def scale_reference(largest: torch.Tensor) -> torch.Tensor:
    """``largest / 8`` rounded to 4 significant bits, from ``2 ** -16`` to 61440."""
    fraction, exponent = torch.frexp((largest / 8.0).clamp(2.0**-16, 61440.0))
    return torch.ldexp((fraction * 16.0 + 0.5).floor(), exponent - 4)


def levels_reference(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels ``[n, D]`` from 0 to 15 of rotated vectors, and their scales ``[n]``: float64."""
    half = vectors.shape[1] // 2
    scales = scale_reference(vectors.abs().amax(1))
    values = (vectors / scales[:, None]).clamp(-7.49, 7.49)
    levels = values.floor()
    rest = values - (levels + 0.5)
    step = torch.where(rest < 0.0, -1.0, 1.0)
    levels = levels + 8.0
    channel = torch.arange(2 * half)
    weight = 2 ** (channel % half % 4 + 4 * (channel // half))
    fraction, exponent = torch.frexp(scales)
    missing = (exponent + 15) * 8 + (fraction * 16.0).long() - 8 - (levels.long() * weight).sum(1)
    rows = torch.arange(vectors.shape[0])
    for bit in range(8):  # what lower bits carry is known when a bit's turn comes
        distance = torch.where(weight == 1 << bit, rest.abs(), -1.0)
        nearest = 2 * half - 1 - distance.flip(1).argmax(1)
        moved = step[rows, nearest] * (missing >> bit & 1)
        levels[rows, nearest] += moved
        missing = missing - (moved.long() << bit)
    return levels, scales


def sketch_reference(k: torch.Tensor) -> torch.Tensor:
    """Keys as the sketch of a sequence's whole vectors gives them back, rotated back.

    Args:
        k: ``[N, Hkv, D]`` keys after RoPE.

    Returns:
        ``[N // 4, Hkv, D]`` float64.
    """
    rotation = hadamard_reference(k.shape[-1])
    means = means_reference(k, VECTOR_SIZE)
    levels, scales = levels_reference((means @ rotation).flatten(0, 1))
    values = ((levels - 7.5) * scales[:, None]).view_as(means)
    return values @ rotation


def token_scores_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    policy: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores of the blocks up to a single token's last candidate: ``[Hkv, blocks]`` float64.

    Args:
        q: ``[1, Hq, D]``, the query at ``positions``.
        k: ``[N, Hkv, D]``.
    """
    (position,) = positions
    size = policy.sel_block_size
    vectors = sketch_reference(k[: position // size * size])
    scores = block_scores_reference(q[0], vectors, size // VECTOR_SIZE, softmax_scale)
    return scores[:, : policy.candidate_range(position)[1]]

"""Oracle of what records of segments hold, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_KEYS = 64


@dataclass(frozen=True)
class DecodedRecords:
    """What records of segments stand for.

    Args:
        vectors: ``[..., 32, D]`` float64, each of 2 keys.
        steps: ``[..., 32, D]``: how far apart the levels of a vector are at most.
        means: ``[..., D]``, the segments' keys.
        variances: ``[..., D / 2]``, one a RoPE pair.
        pair_scales: ``[..., D / 2]``.
    """

    vectors: torch.Tensor
    steps: torch.Tensor
    means: torch.Tensor
    variances: torch.Tensor
    pair_scales: torch.Tensor


def records_reference(keys: torch.Tensor) -> DecodedRecords:
    """What the records of whole segments' keys ``[..., 64, D]`` stand for."""
    keys = keys.double()
    half = keys.shape[-1] // 2
    means = (keys.sum(-2) / _KEYS).clamp(-65504.0, 65504.0).to(torch.float16).double()
    vectors = (keys[..., 0::2, :] + keys[..., 1::2, :]) / 2
    rest = vectors - means[..., None, :]
    sizes = ((rest[..., :half] ** 2 + rest[..., half:] ** 2).mean(-2) / 2).sqrt()
    pair_scales = pair_scales_reference(sizes)
    channel_scales = torch.cat([pair_scales, pair_scales], -1)[..., None, :]
    z = rest / channel_scales
    width = (z**2).mean(-1, keepdim=True).sqrt()
    levels = torch.where(z.abs() >= width, 3.0, 1.0) * torch.where(z < 0.0, -1.0, 1.0)
    rho = (z**2).sum(-1, keepdim=True) / (z * levels).sum(-1, keepdim=True)
    rho = short_float_reference(rho.nan_to_num(0.0))
    each = torch.repeat_interleave(vectors, 2, dim=-2)
    variance = ((keys - each) ** 2).mean(-2)
    variances = (variance[..., :half] + variance[..., half:]) / 2
    return DecodedRecords(
        vectors=means[..., None, :] + rho * levels * channel_scales,
        steps=(2.0 * rho * channel_scales).expand_as(vectors),
        means=means,
        variances=e5m2_reference(variances),
        pair_scales=pair_scales,
    )


def pair_scales_reference(sizes: torch.Tensor) -> torch.Tensor:
    """Sizes ``[..., D / 2]`` rounded to 1, 1.5, 2, 3, ..., at most 15 such below the largest."""
    fraction, exponent = torch.frexp(sizes.clamp(2.0**-64, 1.5 * 2.0**63))
    steps = (fraction * 4.0 + 0.5).floor() + 2.0 * exponent  # 2 for a power of two, 3 between two
    steps = torch.maximum(steps, steps.amax(-1, keepdim=True) - 15.0)
    octave = ((steps - 2.0) / 2.0).floor()
    return torch.ldexp((steps - 2.0 * octave) / 4.0, octave)


def short_float_reference(x: torch.Tensor) -> torch.Tensor:
    """Non-negative ``x`` at 4 bits of mantissa, halves up: 0, and ``17/16 * 2 ** -8`` to 248."""
    fraction, exponent = torch.frexp(x)
    rounded = torch.ldexp((fraction * 32.0 + 0.5).floor(), exponent - 5)
    return torch.where(rounded > 2.0**-8, rounded.clamp(max=248.0), 0.0)


def e5m2_reference(x: torch.Tensor) -> torch.Tensor:
    """Non-negative ``x`` rounded to float8 e5m2, halves to even, at most 57344."""
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-13) - 3)
    return ((x / step).round() * step).clamp(max=57344.0)

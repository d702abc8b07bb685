"""Records of segments and the choice by them in float64, from their description alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

MARGIN = 0.03
"""Most error of a score, in steps of its key, each of a hundredth."""


@dataclass(frozen=True)
class Fields:
    """The numbers of records, float64.

    Args:
        levels: ``[..., 32, D]``, -1.5 to 1.5.
        mean: ``[..., D]``.
        spreads, sizes: ``[..., D / 2]``, of RoPE pairs.
        value_levels: ``[..., D]``, -7.5 to 7.5.
        scales: ``[..., 32]``.
        value_scale: ``[...]``.
    """

    levels: torch.Tensor
    mean: torch.Tensor
    spreads: torch.Tensor
    sizes: torch.Tensor
    value_levels: torch.Tensor
    scales: torch.Tensor
    value_scale: torch.Tensor

    def of(self, segments: slice, head: int) -> Fields:
        """Those of some segments of a KV head, where the fields are ``[segments, Hkv, ...]``."""
        return Fields(*(getattr(self, f.name)[segments, head] for f in fields(self)))

    @property
    def vectors(self) -> torch.Tensor:
        """``[..., 32, D]``."""
        sizes = torch.cat([self.sizes, self.sizes], -1).unsqueeze(-2)
        return self.mean.unsqueeze(-2) + self.scales.unsqueeze(-1) * self.levels * sizes

    @property
    def value(self) -> torch.Tensor:
        """``[..., D]``."""
        return self.value_levels * self.value_scale.unsqueeze(-1)


def read(records: torch.Tensor, dim: int) -> Fields:
    """The fields of records ``[..., bytes]``."""
    sizes = (8 * dim, 2 * dim, dim // 2, dim // 2, dim // 4, 32, 1, 1, 2)
    used = records[..., : sum(sizes)]
    levels, mean, spreads, value, pairs, scales, base, unused, value_scale = used.split(sizes, -1)
    assert not unused.any()
    assert not records[..., sum(sizes) :].any()
    levels = levels.unflatten(-1, (32, -1))
    quarters = [levels >> shift & 3 for shift in (0, 2, 4, 6)]
    pairs = torch.cat([pairs & 15, pairs >> 4], -1)
    codes = base.int() - pairs
    scale_codes = scales.double()
    scale = (1 + scale_codes % 16 / 16) * 2.0 ** (scale_codes // 16 - 8)
    return Fields(
        levels=torch.cat(quarters, -1).double() - 1.5,
        mean=mean.contiguous().view(torch.bfloat16).double(),
        spreads=spreads.contiguous().view(torch.float8_e4m3fn).double(),
        sizes=pair_size(codes),
        value_levels=torch.cat([value & 15, value >> 4], -1).double() - 7.5,
        scales=torch.where(scale_codes > 0, scale, 0.0),
        value_scale=value_scale.contiguous().view(torch.float16).double()[..., 0],
    )


def encode(keys: torch.Tensor, values: torch.Tensor, given: Fields | None = None) -> Fields:
    """The fields of segments ``[..., 64, D]`` float64.

    Args:
        given: a record of them, from whose mean and sizes the rest follows: a mean or a size at the
            border of two roundings changes many levels.
    """
    mean = values_bf16(keys.mean(-2))
    pairs = keys.unflatten(-2, (32, 2))
    vectors = pairs.mean(-2)
    spread = pair_means((pairs - vectors.unsqueeze(-2)).flatten(-3, -2).square()).sqrt()
    rest = vectors - (mean if given is None else given.mean).unsqueeze(-2)
    codes = pair_codes(pair_means(rest.square()).sqrt())
    sizes = pair_size(codes.clamp(min=codes.amax(-1, keepdim=True) - 15))
    used = sizes if given is None else given.sizes
    z = rest / torch.cat([used, used], -1).unsqueeze(-2)
    edge = 0.9957 * z.square().mean(-1, keepdim=True).sqrt()
    levels = torch.where(edge > 0, (z / edge).floor(), 0.0).clamp(-2, 1) + 0.5
    scales = z.square().sum(-1) / (z * levels).sum(-1)
    value = values.mean(-2)
    value_scale = (value.abs().amax(-1) / 7.5).half().double()
    value_levels = (value / value_scale.unsqueeze(-1)).floor().clamp(-8, 7) + 0.5
    return Fields(
        levels=levels,
        mean=mean,
        spreads=spread.clamp(max=448.0).to(torch.float8_e4m3fn).double(),
        sizes=sizes,
        value_levels=value_levels,
        scales=rounded(scales, 4),
        value_scale=value_scale,
    )


def values_bf16(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded to bfloat16."""
    return x.to(torch.bfloat16).double()


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Positive ``x`` with so many bits of mantissa, halves up."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2 ** (bits + 1) + 0.5).floor(), exponent - bits - 1)


def pair_codes(sizes: torch.Tensor) -> torch.Tensor:
    """Codes whose :func:`pair_size` is the nearest float of one bit of mantissa."""
    fraction, exponent = torch.frexp(rounded(sizes, 1))
    return ((exponent - 1 + 64) * 2 + (fraction >= 0.75)).clamp(0, 255)


def _within(ratio: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda a, b: torch.maximum(a, b) <= ratio * torch.minimum(a, b)


def _one_level(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs() <= 1


STEPS = {
    "levels": _one_level,
    "value_levels": _one_level,
    "sizes": _within(1.5),
    "spreads": _within(2.0),
    "scales": _within(17 / 16),
    "value_scale": _within(1.001),
}
"""Whether two of a field are at most one rounding apart."""


def pair_size(codes: torch.Tensor) -> torch.Tensor:
    """1, 1.5, 2, 3, 4 ... for the codes 128, 129, 130 and so on."""
    codes = codes.double()
    return (1 + codes % 2 / 2) * 2.0 ** (codes // 2 - 64)


def pair_means(squares: torch.Tensor) -> torch.Tensor:
    """Means ``[..., D / 2]`` over rows and both channels of pairs of ``[..., rows, D]``."""
    lower, upper = squares.mean(-2).chunk(2, -1)
    return (lower + upper) / 2


def token_cells(
    q: torch.Tensor,
    k: torch.Tensor,
    fields: Fields,
    front: int,
    local: int,
    top_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The cells that a token and KV head choose, and what is left of each segment.

    Args:
        q: ``[G, D]`` float64.
        k: ``[N, D]``, up to the token's own.
        fields: of the segments ``[front, local)``.
        front, local: segments.

    Returns:
        Cells from ``front`` on, ascending; logits ``[G, local - front]``; whether scores that are
        wrong by the margin choose the same.
    """
    logits = scale * torch.einsum("gd,nvd->gnv", q, fields.vectors)
    lower, upper = (q**2).chunk(2, -1)
    squares = (lower + upper) @ (fields.spreads**2).mT
    gain = (1 + scale**2 * squares).sqrt() - 1
    near = torch.cat([k[: 64 * front], k[64 * local :]])
    every = torch.cat([scale * q @ near.mT, logits.flatten(1) + math.log(2)], -1)
    total = every.logsumexp(-1)
    scores = (logits + gain.unsqueeze(-1) + math.log(2) - total[:, None, None]).exp().sum(0)
    scores = scores.nan_to_num(0.0, math.inf).flatten()
    steps = key_steps(scores)
    keys = steps.floor().clamp(0, 2047)
    order = keys.argsort(descending=True, stable=True)
    chosen = order[:top_k].sort().values
    edges = torch.stack([keys[order[:top_k]][-1:], keys[order[:top_k]][-1:] + 1]).clamp(min=1)
    sure = bool(((steps - edges).abs() > MARGIN).all())
    left = torch.ones(scores.shape[0], dtype=torch.bool)
    left[chosen] = False
    rest = (logits.flatten(1) + math.log(2)).masked_fill(~left, -math.inf)
    return chosen, rest.unflatten(1, (-1, 32)).logsumexp(-1), sure


def key_steps(scores: torch.Tensor) -> torch.Tensor:
    """Keys before they are cut to integers: 64 an octave, linear within a step's float."""
    fraction, exponent = torch.frexp(scores)
    steps = (exponent + 27) * 64.0 + (fraction * 2 - 1) * 64.0
    return torch.where(scores > 0.0, steps, -math.inf)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fields: Fields,
    front: int,
    local: int,
    top_k: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, bool]:
    """Output ``[G, D]`` of a token and KV head, and whether its choice is sure; see above."""
    cells, rest, sure = token_cells(q, k, fields, front, local, top_k, scale)
    keys = (cells * 2 + 64 * front)[:, None] + torch.arange(2)
    seen = torch.cat([torch.arange(64 * front), keys.flatten(), torch.arange(64 * local, len(k))])
    logits = torch.cat([scale * q @ k[seen].mT, rest], -1)
    values = torch.cat([v[seen], fields.value])
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None]], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return logits.softmax(-1) @ values, sure

"""The choice by the records that pages hold, in float64, from their bytes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from sparsek_kernels.paged.sample import CELL_BITS, STEPS, sample_cells, weight_steps

MARGIN = 0.0025
"""Most error of a score, in steps of its key: a quarter of an octave each."""


@dataclass(frozen=True)
class Fields:
    """The numbers of records, float64.

    Args:
        levels: ``[..., 32, D]``, 1, 3, -1 or -3.
        mean: ``[..., D]``.
        variances, sizes: ``[..., D / 2]``, of RoPE pairs.
        value_levels: ``[..., D]``, -7.5 to 7.5.
        scales: ``[..., 32]``.
        value_scale: ``[...]``.
    """

    levels: torch.Tensor
    mean: torch.Tensor
    variances: torch.Tensor
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
    levels, mean, variances, value, pairs, scales, base, unused, value_scale = used.split(sizes, -1)
    assert not unused.any()
    assert not records[..., sum(sizes) :].any()
    levels = levels.unflatten(-1, (32, -1))
    meaning = torch.tensor([1.0, 3.0, -3.0, -1.0])
    quarters = [meaning[(levels >> (6 - 2 * p) & 3).long()] for p in range(4)]
    pairs = torch.cat([pairs & 15, pairs >> 4], -1)
    codes = base.int() - pairs
    scale_codes = scales.double()
    scale = (1 + scale_codes % 16 / 16) * 2.0 ** (scale_codes // 16 - 8)
    return Fields(
        levels=torch.cat(quarters, -1).double(),
        mean=mean.contiguous().view(torch.float16).double(),
        variances=variances.contiguous().view(torch.float8_e5m2).double(),
        sizes=pair_size(codes),
        value_levels=torch.cat([value & 15, value >> 4], -1).double() - 7.5,
        scales=torch.where(scale_codes > 0, scale, 0.0),
        value_scale=value_scale.contiguous().view(torch.float16).double()[..., 0],
    )


def pair_size(codes: torch.Tensor) -> torch.Tensor:
    """1, 1.5, 2, 3, 4 ... for the codes 128, 129, 130 and so on."""
    codes = codes.double()
    return (1 + codes % 2 / 2) * 2.0 ** (codes // 2 - 64)


def token_entries(
    q: torch.Tensor,
    k: torch.Tensor,
    fields: Fields,
    front: int,
    local: int,
    top_k: int,
    scale: float,
    start: int,
) -> tuple[torch.Tensor, bool]:
    """The entries that the tokens of a request choose for a KV head, cells from ``front`` on.

    Args:
        q: ``[n, G, D]`` float64.
        k: ``[N, D]``, up to the last token's own.
        fields: of the segments from ``front`` on, up to the first token's own at least.
        front, local: segments; those between compete.
        start: of the sample's sum.

    Returns:
        With it whether scores that are wrong by the margin choose the same.
    """
    own, far = (len(k) - len(q)) // 64, local - front
    logits = scale * torch.einsum("tgd,nvd->tgnv", q, fields.vectors[: own - front])
    lower, upper = (q**2).chunk(2, -1)
    squares = (lower + upper) @ fields.variances[:far].mT
    gain = (1 + scale**2 * squares).sqrt() - 1
    every = torch.cat([scale * q @ k.mT, logits.flatten(2) + math.log(2)], -1)
    every[..., 64 * front : 64 * own] = -math.inf
    for token in range(len(q)):
        every[token, :, len(k) - len(q) + token + 1 : len(k)] = -math.inf
    total, logits = every.logsumexp(-1), logits[..., :far, :]
    scores = (logits + gain.unsqueeze(-1) + math.log(2) - total[..., None, None]).exp().sum((0, 1))
    steps = key_steps(scores.nan_to_num(0.0, math.inf), top_k / q.shape[:2].numel())
    keys, edges = steps.floor().clamp(0, 63).long(), steps.round()
    sure = ((steps - edges).abs() > MARGIN) | (edges < 1) | (edges > 63)
    counts = torch.bincount(keys.flatten(), minlength=64)
    rounded = weight_steps(counts, top_k).equal(weight_steps(counts.double(), top_k))
    return sample_cells(keys, counts, top_k, start), rounded and bool(sure.all())


def key_steps(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Keys before they are cut to integers: 4 an octave, linear within one.

    Args:
        share: cells that are chosen for each token and query head; the last key begins below its
            inverse.
    """
    fraction, exponent = torch.frexp(scores)
    octaves = exponent - 1 + math.floor(math.log2(max(share, 1.0)))
    steps = 63 + 4 * octaves + (fraction * 2 - 1) * 4
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
    start: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, bool]:
    """Outputs ``[n, G, D]`` for a KV head, and whether the choice is sure; see above."""
    far, sure = torch.empty(0, dtype=torch.long), True
    if local > front:
        found, sure = token_entries(q, k, fields, front, local, top_k, scale, start)
        far = found[found >= 0].long()
    cells = far & (1 << CELL_BITS) - 1
    keys = (cells * 2 + 64 * front)[:, None] + torch.arange(2)
    near = torch.cat([torch.arange(64 * front), torch.arange(64 * local, len(k))])
    seen = torch.cat([keys.flatten(), near])
    weights = torch.zeros(len(seen), dtype=torch.double)
    weights[: keys.numel()] = ((far >> CELL_BITS) * math.log(2) / STEPS).repeat_interleave(2)
    logits, values = scale * q @ k[seen].mT + weights, v[seen]
    own = len(k) - len(q) + torch.arange(len(q))
    logits = logits.masked_fill((seen > own[:, None])[:, None], -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None].expand(len(q), -1, 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return logits.softmax(-1) @ values, sure

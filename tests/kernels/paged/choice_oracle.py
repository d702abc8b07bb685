"""The choice by the records that pages hold, in float64, from their bytes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from sparsek_kernels.paged.sample_reference import Choice, draw_by_scores, key_reference

MARGIN = 0.0005
"""Most relative error of a score."""


@dataclass(frozen=True)
class Fields:
    """The numbers of records, float64.

    Args:
        levels: ``[..., 32, D]``, 1, 3, -1 or -3.
        mean: ``[..., D]``.
        variances, sizes: ``[..., D / 2]``, of RoPE pairs.
        scales: ``[..., 32]``.
    """

    levels: torch.Tensor
    mean: torch.Tensor
    variances: torch.Tensor
    sizes: torch.Tensor
    scales: torch.Tensor

    def of(self, segments: slice, head: int) -> Fields:
        """Those of some segments of a KV head, where the fields are ``[segments, Hkv, ...]``."""
        return Fields(*(getattr(self, f.name)[segments, head] for f in fields(self)))

    @property
    def vectors(self) -> torch.Tensor:
        """``[..., 32, D]``."""
        sizes = torch.cat([self.sizes, self.sizes], -1).unsqueeze(-2)
        return self.mean.unsqueeze(-2) + self.scales.unsqueeze(-1) * self.levels * sizes


def read(records: torch.Tensor, dim: int) -> Fields:
    """The fields of records ``[..., bytes]``."""
    sizes = (8 * dim, 2 * dim, dim // 2, dim // 4, 32, 1)
    used = records[..., : sum(sizes)]
    levels, mean, variances, pairs, scales, base = used.split(sizes, -1)
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
        scales=torch.where(scale_codes > 0, scale, 0.0),
    )


def pair_size(codes: torch.Tensor) -> torch.Tensor:
    """1, 1.5, 2, 3, 4 ... for the codes 128, 129, 130 and so on."""
    codes = codes.double()
    return (1 + codes % 2 / 2) * 2.0 ** (codes // 2 - 64)


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    fields: Fields,
    front: int,
    local: int,
    top_k: int,
    scale: float,
    start: int,
) -> Choice:
    """What the tokens of a request choose for a KV head, which is the choice's head 0.

    Args:
        q: ``[n, G, D]`` float64.
        k: ``[N, D]``, up to the last token's own.
        fields: of the segments from ``front`` on, up to the first token's own at least.
        front, local: segments; those between compete.
        top_k: places of the list.
        scale: of logits.
        start: what the sum of shares begins with, of 65536 (``start_reference``).
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
    scores = scores.nan_to_num(0.0, math.inf).flatten()
    rows = q.shape[:2].numel()
    return draw_by_scores(scores[None], start, top_k, 32 * front, rows)


def sure(choice: Choice) -> bool:
    """Whether scores that are wrong by the margin choose the same list."""
    places = len(choice.entries[0])
    keys = [
        key_reference(choice.scores[0] * (1.0 + error), places, choice.rows)
        for error in (-MARGIN, 0.0, MARGIN)
    ]
    return all(torch.equal(other, keys[0]) for other in keys[1:])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    entries: Sequence[int],
    front: int,
    local: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs ``[n, G, D]`` for a KV head, over the entries of a list; see above."""
    logs = torch.zeros(len(k), dtype=torch.float64)
    logs[64 * front : 64 * local] = -math.inf
    for entry in entries:
        if entry >= 0:
            cell, steps = entry % 2**21, entry // 2**21
            logs[2 * cell : 2 * cell + 2] = steps / 32 * math.log(2)
    logits = (scale * q @ k.mT + logs).masked_fill(logs.isinf(), -math.inf)  # of NaN keys too
    own = len(k) - len(q) + torch.arange(len(q))
    logits = logits.masked_fill((torch.arange(len(k)) > own[:, None])[:, None], -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None].expand(len(q), -1, 1)], -1)
    return logits.softmax(-1)[..., : len(k)] @ v

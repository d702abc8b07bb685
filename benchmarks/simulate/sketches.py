"""Sketches: few bits that stand for the keys of a page, and what a page keeps beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

PAGE = 64
LEVELS = {2: ((0.9816,), (0.4528, 1.510))}
"""Lloyd-Max thresholds and levels of a normal variable; more bits have equal steps."""
STEPS = {3: 0.586, 4: 0.3352}
"""The best equal steps of a normal variable, in its standard deviations."""


@dataclass(frozen=True)
class Sketch:
    """How the keys of a page are made into vectors.

    Args:
        keys: keys whose mean is one vector.
        bits: bits a channel; 0 keeps the exact means.
        centred: whether the page's mean (bf16) is taken out first, and kept beside the vectors.
        basis: ``hadamard`` spreads large channels over the others; ``pairs`` divides each pair
            of channels that RoPE turns together by its size in the page, in half octaves.
        scale: a vector's scale by its ``largest`` channel, or by its ``size``: levels are those
            of a normal variable, and dot products with the vector itself come out exactly.
    """

    keys: int
    bits: int
    centred: bool = True
    basis: Literal["hadamard", "pairs"] = "hadamard"
    scale: Literal["largest", "size"] = "largest"

    def bytes_per_key(self, head_dim: int) -> float:
        """Bytes that are read for a key: levels, scales, the page's mean."""
        levels = head_dim * (self.bits or 16) / 8 / self.keys
        scales = 2 / self.keys if self.bits and self.centred else 0  # 0.2.0 hides its scales
        mean = 2 * head_dim / PAGE if self.centred else 0
        pairs = (head_dim / 4 + 1) / PAGE if self.basis == "pairs" else 0
        return levels + scales + mean + pairs


SKETCHES = {
    "m2": Sketch(2, 0),
    "m4": Sketch(4, 0),
    "m8": Sketch(8, 0),
    "m16": Sketch(16, 0),
    "i4": Sketch(4, 4, centred=False),
    "p4": Sketch(4, 4),
    "p4x2": Sketch(2, 4),
    "p2x2r": Sketch(2, 2, scale="size"),
    "p2dr": Sketch(2, 2, basis="pairs", scale="size"),
    "p3x2dr": Sketch(2, 3, basis="pairs", scale="size"),
    "p4x2dr": Sketch(2, 4, basis="pairs", scale="size"),
    "p4dr": Sketch(4, 4, basis="pairs", scale="size"),
    "p2x1dr": Sketch(1, 2, basis="pairs", scale="size"),
    "p4x16dr": Sketch(16, 4, basis="pairs", scale="size"),
}
"""``i4`` is the sketch of 0.2.0; ``m*`` are exact means."""


class Vectors(NamedTuple):
    """A page's vectors, less its centre.

    Args:
        centre: ``[H, pages, D]``, the page's mean, or zeros.
        rest: ``[H, pages, 64 / keys, D]``.
    """

    centre: torch.Tensor
    rest: torch.Tensor

    def logits(self, q: torch.Tensor) -> torch.Tensor:
        """``[H, G, R, pages, 64 / keys]``: products of ``q [H, G, R, D]``, in fp32."""
        rows = q.float().flatten(1, 2)
        made = (rows @ self.rest.flatten(1, 2).mT).unflatten(-1, self.rest.shape[1:3])
        made += (rows @ self.centre.mT)[..., None]
        return made.unflatten(1, q.shape[1:3])


class Pages:
    """What the complete pages of a layer keep; everything is made once, when asked for.

    Args:
        keys: ``[H, P, D]``.
        values: ``[H, P, D]``.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.count = keys.shape[1] // PAGE
        self.head_dim = keys.shape[2]
        whole = self.count * PAGE
        self._keys = keys[:, :whole].unflatten(1, (self.count, PAGE))
        self._values = values[:, :whole].unflatten(1, (self.count, PAGE))
        self._made: dict[tuple[str, int | str], Any] = {}

    def mean(self) -> torch.Tensor:
        """``[H, pages, D]``: the mean of a page's keys as it is stored, in bf16."""
        if ("mean", 0) not in self._made:
            self._made["mean", 0] = self._keys.float().mean(2).bfloat16().float()
        return self._made["mean", 0]

    def vectors(self, name: str) -> Vectors:
        """The vectors of a sketch."""
        if ("vectors", name) not in self._made:
            centre = self.mean()
            centre = centre if SKETCHES[name].centred else torch.zeros_like(centre)
            rest = quantise(self._means(SKETCHES[name].keys) - centre[:, :, None], SKETCHES[name])
            self._made["vectors", name] = Vectors(centre, rest)
        return self._made["vectors", name]

    def variance(self, keys: int = PAGE) -> torch.Tensor:
        """``[H, pages, D / 2]``: the variance of keys about the mean of every ``keys`` of them.

        One figure for each pair of channels that RoPE turns together, its root in e4m3.
        """
        if ("variance", keys) not in self._made:
            mean = self.mean()[:, :, None] if keys == PAGE else self._means(keys)
            apart = self._keys.float() - mean.repeat_interleave(keys, 2)
            found = _by_pair(apart.pow(2).mean(2)).sqrt().clamp(max=448)
            self._made["variance", keys] = found.to(torch.float8_e4m3fn).float().pow(2)
        return self._made["variance", keys]

    def value_means(self, bits: int) -> torch.Tensor:
        """``[H, pages, D]``: the mean of a page's values, in ``bits`` bits with an fp16 scale."""
        if ("values", bits) not in self._made:
            mean = self._values.float().mean(2)
            scale = mean.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
            scale = scale.half().float().clamp(min=1e-7)
            levels = (mean / scale).floor().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            self._made["values", bits] = (levels + 0.5) * scale
        return self._made["values", bits]

    def shares(self, keys: int) -> torch.Tensor:
        """``[H, pages, 64 / keys]``: the variance of every ``keys`` keys over their page's."""
        if ("shares", keys) not in self._made:
            apart = self._keys.float() - self._means(keys).repeat_interleave(keys, 2)
            page = self.variance(keys).repeat(1, 1, 2)[:, :, None].clamp(min=1e-9)
            share = (apart.pow(2) / page).unflatten(2, (-1, keys)).mean((3, 4))
            self._made["shares", keys] = share.to(torch.float8_e4m3fn).float()
        return self._made["shares", keys]

    def logits(self, q: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """``[H, G, R, pages]``: logs of the sums of a page's exps, by its mean and variance."""
        made = softmax_scale * (q.float().flatten(1, 2) @ self.mean().mT).unflatten(1, q.shape[1:3])
        return made + math.log(PAGE) + self.gain(q, softmax_scale)[..., 0]

    def gain(
        self, q: torch.Tensor, softmax_scale: float, keys: int = PAGE, by_vector: bool = False
    ) -> torch.Tensor:
        """``[H, G, R, pages, 1 or 64 / keys]``: what spread adds to the log of a sum of exps.

        Half the variance of the logits about the mean of every ``keys`` keys where that is small,
        its root where it is large; the page's, or that of each vector.
        """
        squares = 2 * _by_pair(q.float().pow(2)).flatten(1, 2)
        variance = (squares @ self.variance(keys).mT).unflatten(1, q.shape[1:3])[..., None]
        if by_vector:
            variance = variance * self.shares(keys)[:, None, None]
        return (1 + softmax_scale**2 * variance).sqrt() - 1

    def _means(self, keys: int) -> torch.Tensor:
        return self._keys.float().unflatten(2, (-1, keys)).mean(3)


def quantise(x: torch.Tensor, sketch: Sketch) -> torch.Tensor:
    """``x [H, pages, vectors, D]`` as the sketch's bits give it back."""
    if not sketch.bits:
        return x
    if sketch.basis == "pairs":
        scales = _pair_scales(x)
        return _levels(x / scales, sketch) * scales
    rotation = hadamard(x.shape[-1]).to(x)
    return _levels(x @ rotation, sketch) @ rotation.T


def hadamard(channels: int) -> torch.Tensor:
    """The normalised Hadamard matrix in Sylvester's order."""
    if channels & (channels - 1):
        raise ValueError(f"channels: expected a power of two, got {channels}")
    matrix = torch.ones(1, 1)
    while len(matrix) < channels:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(channels)


def _levels(x: torch.Tensor, sketch: Sketch) -> torch.Tensor:
    half = 2 ** (sketch.bits - 1)
    if sketch.scale == "largest":
        scale = (x.abs().amax(-1, keepdim=True) / half).half().float().clamp(min=1e-7)
        return ((x / scale).floor().clamp(-half, half - 1) + 0.5) * scale
    unit = x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-7)
    if sketch.bits in LEVELS:
        (threshold,), (low, high) = LEVELS[sketch.bits]
        size = torch.where(unit.abs() < threshold, low, high)
        levels = torch.where(unit < 0, -size, size)
    else:
        step = STEPS[sketch.bits]
        levels = ((unit / step).floor().clamp(-half, half - 1) + 0.5) * step
    size = x.pow(2).sum(-1, keepdim=True) / (x * levels).sum(-1, keepdim=True).clamp(min=1e-7)
    return levels * size.half().float()


def _pair_scales(x: torch.Tensor) -> torch.Tensor:
    """``[H, pages, 1, D]``: sizes of pairs of channels, 16 half octaves below the largest."""
    size = _by_pair(x.pow(2).mean(2, keepdim=True)).sqrt().clamp(min=1e-6)
    code = (2 * size.log2()).round()
    code = torch.maximum(code, code.amax(-1, keepdim=True) - 15)
    return (code / 2).exp2().repeat(1, 1, 1, 2)


def _by_pair(x: torch.Tensor) -> torch.Tensor:
    """``[..., D / 2]``: the mean of channel ``d`` and channel ``d + D / 2``."""
    a, b = x.chunk(2, -1)
    return (a + b) / 2

"""What tests of benchmarks/simulate draw, and attention in plain torch to hold it against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

HEADS, GROUP, DIM = 2, 3, 32
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


def draw(rows: int, count: int, seed: int = 0) -> Tensors:
    """Queries of the last rows, keys with large common channels, values."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, GROUP, rows, DIM, generator=make) * 1.5
    spread = torch.rand(DIM // 2, generator=make).mul(4).sub(2).exp().repeat(2)
    k = torch.randn(HEADS, count, DIM, generator=make) * spread / spread.mean()
    k += 8 * torch.randn(HEADS, 1, DIM, generator=make)
    return q, k, torch.randn(HEADS, count, DIM, generator=make)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows."""
    count, rows = k.shape[1], q.shape[2]
    seen = torch.arange(count) <= torch.arange(count - rows, count)[:, None]
    return scaled_dot_product_attention(q, k[:, None], v[:, None], attn_mask=seen)


def logits_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Of all pairs, ``[heads, group, rows, keys]``."""
    return torch.einsum("hgrd,hnd->hgrn", q, k) / math.sqrt(DIM)


def attending(
    logits: torch.Tensor, v: torch.Tensor, ranges: Iterable[tuple[int, int]]
) -> torch.Tensor:
    """Attention of one head to some ranges of keys alone."""
    keep = torch.zeros(len(v), dtype=torch.bool)
    for begin, end in ranges:
        keep[begin:end] = True
    return logits.masked_fill(~keep, -math.inf).softmax(-1) @ v

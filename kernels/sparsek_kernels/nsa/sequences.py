"""Where sequences lie in fixed-length and packed tensors, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Span:
    """One sequence: its batch index, its rows of q and of k, and its compressed rows."""

    batch: int
    rows: slice
    keys: slice
    compressed: slice


def spans(
    cu_seqlens: torch.Tensor | None,
    batch: int,
    num_q: int,
    num_k: int,
    cmp_block_size: int = 1,
    cmp_stride: int = 1,
) -> Iterator[Span]:
    """Every sequence of a batch, for host loops; reads ``cu_seqlens`` on the host."""
    if cu_seqlens is None:
        whole = slice(0, max((num_k - cmp_block_size) // cmp_stride + 1, 0))
        for b in range(batch):
            yield Span(b, slice(0, num_q), slice(0, num_k), whole)
        return
    first = 0
    for lo, hi in pairwise(cu_seqlens.tolist()):
        count = max((hi - lo - cmp_block_size) // cmp_stride + 1, 0)
        yield Span(0, slice(lo, hi), slice(lo, hi), slice(first, first + count))
        first += count


def compressed_cu_seqlens(
    cu_seqlens: torch.Tensor, cmp_block_size: int, cmp_stride: int
) -> torch.Tensor:
    """Offsets of each sequence's compressed blocks, ``[S + 1]`` int32, without synchronising.

    Args:
        cu_seqlens: ``[S + 1]`` int32 token offsets of packed sequences.
        cmp_block_size: tokens of a compressed block.
        cmp_stride: tokens from one block to the next.
    """
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    counts = ((lengths - cmp_block_size) // cmp_stride + 1).clamp(min=0)
    out = torch.zeros_like(cu_seqlens)
    out[1:] = torch.cumsum(counts, 0, dtype=torch.int32)
    return out


def compressed_rows(
    cu_seqlens: torch.Tensor | None, num_tokens: int, cmp_block_size: int, cmp_stride: int
) -> int:
    """Rows that a compressed tensor has: exact for fixed lengths, an upper bound when packed.

    The bound, ``tokens // cmp_stride``, needs no look at the device; rows past the last
    sequence's blocks hold zeros and are never read.
    """
    if cu_seqlens is None:
        return max((num_tokens - cmp_block_size) // cmp_stride + 1, 0)
    return num_tokens // cmp_stride

"""The sketch of a page, for the selection of single tokens: 4-bit means of 4 keys each.

Vector ``n`` of a page is the mean of the keys of its tokens ``4n`` to ``4n + 3`` (of those that are
there so far), rotated by a Hadamard matrix so that outlier channels spread, and rounded to 16
levels.  docs/selection.md says what it is for.

Layout: ``[num_pages, Hkv, summary_bytes]`` uint8.  Of a page and KV head come first the levels,
one row of ``D / 2`` bytes per vector: channel ``d`` in the low half of byte ``d``, channel
``d + D / 2`` in its high half.  Then come one float16 scale per vector, and padding.  Level ``l``
of 0 to 15 with scale ``s`` stands for ``(l - 7.5) * s``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from sparsek_kernels.paged.policy import CELL_SIZE, ceil_div

VECTOR_SIZE = 4
"""Tokens whose keys share one vector."""

ALIGNMENT = 16
"""Bytes: a multiple of them is kept per page and KV head, so that pages stay aligned."""

_MIDDLE = 7.5


def page_vectors(page_size: int) -> int:
    """Vectors per page and KV head.

    Raises:
        ValueError: the page does not hold whole cells.
    """
    if page_size < CELL_SIZE or page_size % CELL_SIZE:
        raise ValueError(f"page_size: expected a multiple of {CELL_SIZE}, got {page_size}")
    return page_size // VECTOR_SIZE


def summary_bytes(page_size: int, head_dim: int) -> int:
    """Bytes that the sketch of one page takes per KV head.

    Raises:
        ValueError: the page does not hold whole cells.
        NotImplementedError: rows of levels would be no whole number of 16-bit words.
    """
    if head_dim % 4:
        raise NotImplementedError(
            f"head_dim: selecting blocks needs a multiple of 4, got {head_dim}; attend everything, "
            "or sinks and a window alone (top_k=0)"
        )
    size = page_vectors(page_size) * (head_dim // 2 + 2)
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


def rotation_size(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


@lru_cache
def _signs(head_dim: int) -> torch.Tensor:
    """Hadamard matrices of 1 and -1 in Sylvester's order along the diagonal: ``[D, D]`` float64."""
    size = rotation_size(head_dim)
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    signs: torch.Tensor = torch.block_diag(*[block] * (head_dim // size))
    return signs


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Vectors ``[..., D]`` rotated as the sketch is, float32; dot products stay as they were.

    Sums are float64, where they are exact: one vector comes out the same in any batch.
    """
    sums = x.double() @ _signs(x.shape[-1]).to(x.device)
    return sums.float().mul_(rotation_size(x.shape[-1]) ** -0.5)


def mean_key(keys: torch.Tensor, filled: torch.Tensor | int) -> torch.Tensor:
    """Means ``[..., D]`` float32 of keys ``[..., 4, D]``, zeros where there are none yet.

    Args:
        filled: how many there are, 1 to 4.
    """
    first, second, third, fourth = keys.float().unbind(-2)
    return (first + second + third + fourth) / filled


def quantise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels ``[..., D]`` uint8 and scales ``[...]`` float16 of rotated float32 vectors."""
    largest = torch.finfo(torch.float16).max
    scale = (vectors.abs().amax(-1) / _MIDDLE).clamp_(max=largest).half()
    step = scale.float()[..., None]
    level = (vectors / step).floor_().clamp_(-8, 7).masked_fill_(step == 0, 0.0)
    return (level + 8).to(torch.uint8), scale


def pack(levels: torch.Tensor) -> torch.Tensor:
    """Rows of bytes ``[..., D / 2]`` of levels ``[..., D]``."""
    low, high = levels.chunk(2, -1)
    return low | high << 4


def sketch_pages(keys: torch.Tensor, k_summary: torch.Tensor) -> None:
    """Sketch whole pages.

    Args:
        keys: ``[P, Hkv, page_size, D]``; k_summary: ``[P, Hkv, summary_bytes]``, written.
    """
    page_size, dim = keys.shape[2:]
    rows, scales = split_summary(k_summary, page_size, dim)
    means = mean_key(keys.unflatten(2, (-1, VECTOR_SIZE)), VECTOR_SIZE)
    levels, scale = quantise(rotate(means))
    rows.copy_(pack(levels))
    scales.copy_(scale)


def split_summary(
    k_summary: torch.Tensor, page_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the rows ``[..., vectors, D / 2]`` uint8 and the scales ``[..., vectors]`` float16.

    Args:
        k_summary: ``[..., summary_bytes]`` uint8.
    """
    vectors = page_vectors(page_size)
    middle = vectors * head_dim // 2
    rows = k_summary[..., :middle].unflatten(-1, (vectors, head_dim // 2))
    scales = k_summary[..., middle : middle + 2 * vectors].view(torch.float16)
    return rows, scales


def read_vectors(k_summary: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """The vectors ``[..., vectors, D]`` float32 that pages keep, rotated.

    A key's dot product with a query is the one of its vector with the query's :func:`rotate`.

    Args:
        k_summary: ``[..., summary_bytes]`` uint8.
    """
    rows, scales = split_summary(k_summary, page_size, head_dim)
    levels = torch.cat([rows & 15, rows >> 4], -1)
    return (levels.float() - _MIDDLE) * scales.float()[..., None]

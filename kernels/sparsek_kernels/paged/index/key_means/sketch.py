"""The sketch of a page, for the selection of single tokens: 4-bit means of 4 keys each.

Vector ``n`` of a page is the mean of the keys of its tokens ``4n`` to ``4n + 3`` (of those that are
there so far), rotated by a Hadamard matrix so that outlier channels spread, and rounded to 16
levels.  docs/selection.md says what it is for.

Layout: ``[num_pages, Hkv, summary_bytes]`` uint8.  A page and KV head has one row of ``D / 2``
bytes per vector, and padding: channel ``d`` in the low half of byte ``d``, channel ``d + D / 2`` in
its high half.  Level ``l`` of 0 to 15 with scale ``s`` stands for ``(l - 7.5) * s``.

The scale takes no room.  It is a float of 5 bits of exponent and 3 of mantissa, and these 8 bits
are the row's *checksum*: the sum of ``byte(i) * 2 ** (i % 4)``, modulo 256.  A level of a low half
thus counts 1, 2, 4 or 8 times, and one of a high half 16, 32, 64 or 128 times.  For each of these
weights the writer may move one level by one step: the one whose value is nearest to halfway between
two levels, where the other level costs next to nothing.  A reader gets the checksums of many rows
by one product with a matrix of weights.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from sparsek_kernels.paged.pages import check_cells

VECTOR_SIZE = 4
"""Tokens whose keys share one vector."""

_MIDDLE = 7.5
_LARGEST = 8.0
"""Steps of a vector's largest channel.  Cut to 7.5 it is a little off, and all others are finer."""
_EDGE = 7.49
"""Values from here on are rounded to the outermost level, which has no next one."""
_FIRST = 111 << 3
"""Exponent of code 0 among float32's, before the 3 bits of a code's mantissa."""


def page_vectors(page_size: int) -> int:
    """Vectors per page and KV head.

    Raises:
        ValueError: the page does not hold whole cells.
    """
    check_cells(page_size)
    return page_size // VECTOR_SIZE


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


def scale_codes(scales: torch.Tensor) -> torch.Tensor:
    """Nearest codes, int32, of non-negative float32 scales."""
    return (((scales.view(torch.int32) + (1 << 19)) >> 20) - _FIRST).clamp_(0, 255)


def code_scales(codes: torch.Tensor) -> torch.Tensor:
    """Float32 scales of int32 codes: ``2 ** -16`` to 61440."""
    return ((codes + _FIRST) << 20).view(torch.float32)


@lru_cache
def _weights(head_dim: int) -> torch.Tensor:
    """``[2, D / 8, 4]`` int32: what a level of each half, run of 4 bytes and byte counts."""
    each = torch.tensor([[1, 2, 4, 8], [16, 32, 64, 128]], dtype=torch.int32)
    return each[:, None].expand(2, head_dim // 8, 4).contiguous()


@lru_cache
def _run_keys(head_dim: int) -> torch.Tensor:
    """``[D / 8, 1]`` int32, by which runs of equals differ."""
    return (torch.arange(head_dim // 8, dtype=torch.int32) << 1)[:, None]


def quantise(vectors: torch.Tensor) -> torch.Tensor:
    """Rows of bytes ``[..., D / 2]`` of rotated float32 vectors ``[..., D]``."""
    dim, device = vectors.shape[-1], vectors.device
    weights, every = _weights(dim).to(device), (-3, -2, -1)
    code = scale_codes(vectors.abs().amax(-1) / _LARGEST)
    values = (vectors / code_scales(code)[..., None]).clamp_(-_EDGE, _EDGE)
    values = values.reshape(*vectors.shape[:-1], *weights.shape)
    lower = values.floor()
    rest = values.sub_(lower + 0.5)
    levels, down = lower.to(torch.int32).add_(8), rest < 0
    # Of each weight the one that is nearest to halfway between two levels, the last of equals.
    keys = rest.abs().view(torch.int32) & -128
    keys.bitwise_or_(_run_keys(dim).to(device)).bitwise_or_(down)
    nearest = keys.amax(-2, keepdim=True)  # [..., 2, 1, 4]
    # Moving the weights ``m`` adds ``m - 2 * (m & downs)``: that is ``missing`` for this ``m``.
    missing = code - (levels * weights).sum(every, dtype=torch.int32)
    downs = ((nearest & 1) * weights[:, :1]).sum(every, dtype=torch.int32)
    moved = (missing + downs) ^ downs
    moves = (keys == nearest) & ((moved[..., None, None, None] & weights) != 0)
    levels.add_(moves).add_(moves & down, alpha=-2)
    low, high = levels.to(torch.uint8).flatten(-2).unbind(-2)
    rows: torch.Tensor = low | high << 4
    return rows


def checksums(rows: torch.Tensor) -> torch.Tensor:
    """Checksums ``[...]`` int32 of rows of bytes ``[..., D / 2]``."""
    weights = _weights(2 * rows.shape[-1])[0].flatten().to(rows.device)
    sums: torch.Tensor = (rows * weights).sum(-1, dtype=torch.int32) & 255
    return sums


def sketch_pages(keys: torch.Tensor, k_summary: torch.Tensor) -> None:
    """Sketch whole pages.

    Args:
        keys: ``[P, Hkv, page_size, D]``; k_summary: ``[P, Hkv, summary_bytes]``, written.
    """
    page_size, dim = keys.shape[2:]
    means = mean_key(keys.unflatten(2, (-1, VECTOR_SIZE)), VECTOR_SIZE)
    view_rows(k_summary, page_size, dim).copy_(quantise(rotate(means)))


def view_rows(k_summary: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """View of the rows ``[..., vectors, D / 2]``.

    Args:
        k_summary: ``[..., summary_bytes]`` uint8.
    """
    shape = (page_vectors(page_size), head_dim // 2)
    rows: torch.Tensor = k_summary[..., : shape[0] * shape[1]].unflatten(-1, shape)
    return rows


def read_vectors(k_summary: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """The vectors ``[..., vectors, D]`` float32 that pages keep, rotated.

    The dot product of a vector and the rotated query (:func:`rotate`) stands for the products of
    the vector's keys and the query.

    Args:
        k_summary: ``[..., summary_bytes]`` uint8.
    """
    rows = view_rows(k_summary, page_size, head_dim)
    levels = torch.cat([rows & 15, rows >> 4], -1)
    return (levels.float() - _MIDDLE) * code_scales(checksums(rows))[..., None]

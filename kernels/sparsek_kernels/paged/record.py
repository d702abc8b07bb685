"""What a page keeps of each complete segment of 64 tokens, for one KV head: a record.

A record lies in the page that holds its 64 keys, one a segment in their order.  Sections, for
``D`` channels (``10.75 D + 34`` bytes, rounded up to 16):

| section | byte | what |
| --- | --- | --- |
| levels | 0 | ``[32, D / 4]``: 2 bits a channel of each vector, the mean of 2 keys less ``mean`` |
| mean | 8 D | ``[D]`` fp16: the segment's mean key |
| variance | 10 D | ``[D / 2]`` e5m2: variance of the keys about their vector, one a RoPE pair |
| pairs | 10.5 D | ``[D / 4]``: the size of each RoPE pair: 4 bits, steps below the largest |
| scales | 10.75 D | ``[32]``: each vector's size, 4 bits of exponent and 4 of mantissa |
| base | 10.75 D + 32 | the largest pair's size: 7 bits of exponent, 1 of mantissa; a byte of 0 |

Channels ``d`` and ``d + D / 2`` are a RoPE pair.  Byte ``b`` of a row of levels has the channels
``b + p D / 4``: of channel ``p`` half of the level, rounded down, in the bits ``7 - 2 p`` and
``6 - 2 p``: -2, -1, 0 and 1 for -3, -1, 1 and 3.  Byte ``b`` of the pairs has the pairs ``b`` and
``b + D / 4``, from its low bits up.

A vector is ``mean + scale * level * size`` of its channel's pair.  Sizes and levels are of the
vectors less the mean as it is stored, which makes up for its rounding.  Numbers are those of the
cache: of an fp8 one without its scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsek_kernels.paged.policy import CELL, SEGMENT

ALIGNMENT = 16
"""Bytes: a multiple of them is kept per page and KV head, so that pages stay aligned."""
MOST_DIM = 512
"""Channels of a head at most."""
VECTOR = CELL
"""Keys that share one vector, and are chosen together."""
VECTORS = SEGMENT // VECTOR
"""Vectors of a record."""

_FIRST_SIZE = (127 - 64) << 1
"""Exponent of a pair's code 0 among float32's, before the bit of its mantissa."""
_FIRST_SCALE = (127 - 8) << 4
"""Exponent of a scale's code 0 among float32's, before the 4 bits of its mantissa."""
_LARGEST_E5M2, _LARGEST_FP16 = 57344.0, 65504.0


class Sections(NamedTuple):
    """Bytes of a record at which its sections begin; that of the levels begins at 0."""

    mean: int
    variance: int
    pairs: int
    scales: int
    base: int
    end: int


def sections(head_dim: int) -> Sections:
    """Where the sections of a record begin, and where the last one ends."""
    scales = 43 * head_dim // 4
    return Sections(
        mean=8 * head_dim,
        variance=10 * head_dim,
        pairs=21 * head_dim // 2,
        scales=scales,
        base=scales + VECTORS,
        end=scales + VECTORS + 2,
    )


def check_head_dim(head_dim: int) -> None:
    """Check that a head's channels can be summarised.

    Raises:
        NotImplementedError: they cannot.
    """
    if head_dim % 8 or head_dim > MOST_DIM:
        raise NotImplementedError(
            f"head_dim: selecting blocks needs a multiple of 8 up to {MOST_DIM}, got {head_dim}; "
            "attend everything, or sinks and a window alone (top_k=0)"
        )


def record_bytes(head_dim: int) -> int:
    """Bytes of a record."""
    return -(-sections(head_dim).end // ALIGNMENT) * ALIGNMENT


def page_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of a page's records, for one KV head.

    Raises:
        ValueError: the page does not hold whole segments.
        NotImplementedError: channels that no record holds.
    """
    check_head_dim(head_dim)
    if page_size < SEGMENT or page_size % SEGMENT:
        raise ValueError(
            f"page_size: expected a multiple of {SEGMENT} tokens, each of which has a record, got "
            f"{page_size}; give pages of {SEGMENT}"
        )
    return page_size // SEGMENT * record_bytes(head_dim)


def view_records(k_summary: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """View of the records ``[..., page_size / 64, record_bytes]``.

    Args:
        k_summary: ``[..., bytes]`` uint8, at least ``page_bytes(page_size, D)``.

    Raises:
        ValueError: records would not begin at multiples of 16 bytes.
    """
    starts = (k_summary.storage_offset(), *k_summary.stride()[:-1])
    if any(start % ALIGNMENT for start in starts):
        raise ValueError(
            f"k_summary: expected pages and heads at multiples of {ALIGNMENT} bytes, got offset "
            f"{starts[0]} and strides {tuple(k_summary.stride())}"
        )
    used = k_summary[..., : page_bytes(page_size, head_dim)]
    records: torch.Tensor = used.unflatten(-1, (-1, record_bytes(head_dim)))
    return records


def encode(keys: torch.Tensor) -> torch.Tensor:
    """Records ``[..., record_bytes]`` of segments' keys ``[..., 64, D]``."""
    first, second = keys.float().unflatten(-2, (VECTORS, VECTOR)).unbind(-2)
    vectors = (first + second) * 0.5
    mean = vectors.mean(-2).clamp_(-_LARGEST_FP16, _LARGEST_FP16).half()
    rest = vectors - mean.float().unsqueeze(-2)  # [..., 32, D]
    sizes = _size_codes(_pair_squares(rest).sqrt_())  # [..., D / 2]
    base = sizes.amax(-1, keepdim=True)
    below = (base - sizes).clamp_(max=15)
    z = rest * _both(1.0 / code_sizes(base - below)).unsqueeze(-2)
    squares = z.square()
    large = squares >= squares.mean(-1, keepdim=True)
    scales = squares.sum(-1) * _inverse((z.abs() * torch.where(large, 3.0, 1.0)).sum(-1))
    variance = _pair_squares((first - second) * 0.5).clamp_(max=_LARGEST_E5M2)
    parts = [
        _pack_levels(z < 0.0, large).flatten(-2),
        mean.view(torch.uint8),
        variance.to(torch.float8_e5m2).view(torch.uint8),
        _pack(below),
        _scale_codes(scales),
        base.to(torch.uint8),
        torch.zeros_like(base, dtype=torch.uint8),
    ]
    dim = keys.shape[-1]
    rest_of_record = record_bytes(dim) - sections(dim).end
    return torch.cat([*parts, parts[0].new_zeros(*base.shape[:-1], rest_of_record)], -1)


def read_vectors(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The vectors ``[..., 32, D]`` float32 of records ``[..., record_bytes]``, means included."""
    at = sections(head_dim)
    levels = _unpack_levels(records[..., : at.mean].unflatten(-1, (VECTORS, -1)))
    scales = code_scales(records[..., at.scales : at.base]).unsqueeze(-1)
    sizes = _both(read_pair_scales(records, head_dim)).unsqueeze(-2)
    return read_means(records, head_dim).unsqueeze(-2) + levels * scales * sizes


def read_means(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The mean keys ``[..., D]`` float32."""
    at = sections(head_dim)
    return records[..., at.mean : at.variance].view(torch.float16).float()


def read_variances(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Variances of the keys about their vectors, ``[..., D / 2]`` float32: one a pair."""
    at = sections(head_dim)
    return records[..., at.variance : at.pairs].view(torch.float8_e5m2).float()


def read_pair_scales(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Sizes ``[..., D / 2]`` float32 of the RoPE pairs."""
    at = sections(head_dim)
    base = records[..., at.base : at.base + 1].int()
    return code_sizes(base - _unpack(records[..., at.pairs : at.scales]))


def code_scales(codes: torch.Tensor) -> torch.Tensor:
    """Float32 scales of uint8 codes: 0, and ``2 ** -8`` to 248."""
    scales = ((codes.int() + _FIRST_SCALE) << 19).view(torch.float32)
    return torch.where(codes > 0, scales, 0.0)


def _scale_codes(scales: torch.Tensor) -> torch.Tensor:
    """Nearest codes, uint8, of non-negative float32 scales."""
    codes = ((scales.view(torch.int32) + (1 << 18)) >> 19) - _FIRST_SCALE
    return codes.clamp_(0, 255).to(torch.uint8)


def code_sizes(codes: torch.Tensor) -> torch.Tensor:
    """Float32 sizes of pairs of int32 codes: ``2 ** -64`` to ``1.5 * 2 ** 63``."""
    return ((codes + _FIRST_SIZE) << 22).view(torch.float32)


def _size_codes(sizes: torch.Tensor) -> torch.Tensor:
    """Nearest codes, int32, of non-negative float32 sizes of pairs."""
    return (((sizes.view(torch.int32) + (1 << 21)) >> 22) - _FIRST_SIZE).clamp_(0, 255)


def _pair_squares(x: torch.Tensor) -> torch.Tensor:
    """Mean squares ``[..., D / 2]`` of RoPE pairs over rows ``[..., rows, D]``."""
    squares: torch.Tensor = x.square().mean(-2).unflatten(-1, (2, -1))
    return squares.mean(-2)


def _both(x: torch.Tensor) -> torch.Tensor:
    """What pairs ``[..., D / 2]`` have for both of their channels, ``[..., D]``."""
    return torch.cat([x, x], -1)


def _inverse(x: torch.Tensor) -> torch.Tensor:
    """``1 / x`` of non-negative numbers, 0 of 0."""
    return torch.where(x > 0.0, 1.0 / x, 0.0)


def _pack_levels(negative: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., D / 4]`` of levels ``[..., D]``, by their signs and sizes (bool)."""
    first, second, third, fourth = ((negative.int() << 1) | (negative ^ large)).chunk(4, -1)
    return ((first << 6) | (second << 4) | (third << 2) | fourth).to(torch.uint8)


def _unpack_levels(packed: torch.Tensor) -> torch.Tensor:
    """Levels ``[..., D]`` float32 of bytes ``[..., D / 4]``: 1, 3, -1 or -3."""
    codes = torch.cat([packed >> shift for shift in (6, 4, 2, 0)], -1) & 3
    return ((codes ^ 2).float() - 2.0) * 2.0 + 1.0


def _pack(levels: torch.Tensor) -> torch.Tensor:
    """Bytes of int32 levels of 4 bits ``[..., n]``, the first half of them in the low bits."""
    low, high = levels.chunk(2, -1)
    return (low | (high << 4)).to(torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Levels ``[..., n]`` uint8 of bytes that :func:`_pack` made."""
    return torch.cat([packed & 15, packed >> 4], -1)

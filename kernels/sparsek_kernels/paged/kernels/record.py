"""The bytes of a record of 64 tokens (record.py), inside a program."""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT: tl.constexpr = tl.constexpr(64)
"""Tokens of a record."""
VECTORS: tl.constexpr = tl.constexpr(32)
"""Vectors of a record, each of 2 tokens."""

_FIRST_SIZE: tl.constexpr = tl.constexpr((127 - 64) << 1)
"""Exponent of a pair's code 0 among float32's, before the bit of its mantissa."""
_FIRST_SCALE: tl.constexpr = tl.constexpr((127 - 8) << 4)
"""Exponent of a scale's code 0 among float32's, before the 4 bits of its mantissa."""


@triton.constexpr_function
def mean_at(head_dim):
    """Byte of a record at which the mean key begins; the levels begin at 0."""
    return 8 * head_dim


@triton.constexpr_function
def variance_at(head_dim):
    """Byte at which the variances of RoPE pairs begin."""
    return 10 * head_dim


@triton.constexpr_function
def pairs_at(head_dim):
    """Byte at which the sizes of RoPE pairs begin."""
    return 21 * head_dim // 2


@triton.constexpr_function
def scales_at(head_dim):
    """Byte at which the vectors' scales begin."""
    return 43 * head_dim // 4


@triton.constexpr_function
def base_at(head_dim):
    """Byte of the largest pair's size."""
    return 43 * head_dim // 4 + 32


@triton.jit
def size_code(size):
    """Nearest codes, int32, of non-negative float32 sizes of pairs."""
    code = ((size.to(tl.int32, bitcast=True) + (1 << 21)) >> 22) - _FIRST_SIZE
    return tl.minimum(tl.maximum(code, 0), 255)


@triton.jit
def size_of(code):
    """Float32 sizes of pairs of int32 codes."""
    return ((code + _FIRST_SIZE) << 22).to(tl.float32, bitcast=True)


@triton.jit
def scale_code(scale):
    """Nearest codes, int32, of non-negative float32 scales."""
    code = ((scale.to(tl.int32, bitcast=True) + (1 << 18)) >> 19) - _FIRST_SCALE
    return tl.minimum(tl.maximum(code, 0), 255)


@triton.jit
def scale_of(code):
    """Float32 scales of codes, which are bytes."""
    code = code.to(tl.int32)
    scale = ((code + _FIRST_SCALE) << 19).to(tl.float32, bitcast=True)
    return tl.where(code > 0, scale, 0.0)


@triton.jit
def e5m2_code(x):
    """Codes of float8 e5m2, int32, nearest to float32 ``x`` of 0 to 57344, halves to even.

    By integers, since no GPU before sm_89 casts to it.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - ((127 - 15) << 2)
    subnormal = (x + 128.0).to(tl.int32, bitcast=True) - 0x43000000  # sums of whole 2 ** -16
    return tl.where(x < 0.00006103515625, subnormal, normal)


@triton.jit
def of_e5m2_code(code):
    """Float16 numbers of non-negative codes of float8 e5m2, which are the first 8 of their bits."""
    return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True)

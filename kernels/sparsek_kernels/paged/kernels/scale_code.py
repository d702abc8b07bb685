"""Scales of the sketch's vectors as codes of 8 bits (sketch.py) inside a program."""

from __future__ import annotations

import triton
import triton.language as tl

_FIRST = tl.constexpr(111 << 3)
"""Exponent of code 0 among float32's, before the 3 bits of a code's mantissa."""


@triton.jit
def code_of(scale):
    """Nearest codes, int32, of non-negative float32 scales."""
    bits = scale.to(tl.int32, bitcast=True)
    code = ((bits + (1 << 19)) >> 20) - _FIRST
    return tl.minimum(tl.maximum(code, 0), 255)


@triton.jit
def scale_of(code):
    """Float32 scales of int32 codes."""
    return ((code << 20) + (_FIRST << 20)).to(tl.float32, bitcast=True)

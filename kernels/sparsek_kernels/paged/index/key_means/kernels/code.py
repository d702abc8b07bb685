"""How the sketch (sketch.py) encodes vectors: rotated, with scales of 8 bits; inside a program."""

from __future__ import annotations

import triton
import triton.language as tl

_FIRST = tl.constexpr(111 << 3)
"""Exponent of code 0 among float32's, before the 3 bits of a code's mantissa."""


@triton.jit
def rotate(x, SIZE: tl.constexpr):
    """Rows of ``x`` ``[ROWS, WIDTH]`` float32 rotated, every ``SIZE`` channels by themselves.

    Each stage adds and subtracts neighbours and puts all sums before all differences; after a stage
    for every bit of an index, all are back in order.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    RUNS: tl.constexpr = ROWS * (WIDTH // SIZE)
    SCALE: tl.constexpr = SIZE**-0.5
    y = tl.reshape(x, [RUNS, SIZE])
    for bit in tl.static_range(16):
        if (1 << bit) < SIZE:
            even, odd = tl.split(tl.reshape(y, [RUNS, SIZE // 2, 2]))
            pairs = tl.join(even + odd, even - odd)
            y = tl.reshape(tl.permute(pairs, (0, 2, 1)), [RUNS, SIZE])
    return tl.reshape(y, [ROWS, WIDTH]) * SCALE


@triton.jit
def halves(x, HEAD_DIM: tl.constexpr):
    """Channels ``d`` and ``d + HEAD_DIM / 2`` of ``[ROWS, WIDTH]``: two ``[ROWS, WIDTH / 2]``.

    Columns from ``HEAD_DIM / 2`` on hold no meaning.
    """
    HALF: tl.constexpr = x.shape[1] // 2
    index = tl.arange(0, HALF)[None, :] + tl.zeros([x.shape[0], HALF], dtype=tl.int32)
    low = tl.gather(x, index, axis=1)
    high = tl.gather(x, tl.minimum(index + HEAD_DIM // 2, x.shape[1] - 1), axis=1)
    return low, high


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

"""Sums of weights over the keys of selection blocks, in the registers of a Hopper product.

They are kept in 16 bits: 6 of exponent and 10 of mantissa, from 2^-59 to 2^5, two in a word.  The
rounding error is at most 2^-11 of a sum.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS: gl.constexpr = gl.constexpr(128)  # compressed keys of a tile
PER_SEL: gl.constexpr = gl.constexpr(4)  # keys that start in a selection block
PER_CMP: gl.constexpr = gl.constexpr(2)  # strides that a key covers
_DROPPED: gl.constexpr = gl.constexpr(13)  # bits of an fp32 mantissa
_LEAST: gl.constexpr = gl.constexpr(67 << 23)  # 2^-60, the exponent that stands for zero
_HELD: gl.constexpr = gl.constexpr(0x1FFFE000)  # sixteen bits above the dropped ones
BLOCK_SUMS_SCALE: gl.constexpr = gl.constexpr(2.0**67)  # of what :func:`block_sums_of` returns


@triton.jit
def arranged_key(place):
    """Key of a tile that lies at ``place``: a thread's places are ``{0, 1} + 2 lane + 8 i``."""
    return place // 2 % 4 * 32 + place // 8 * 2 + place % 2


@gluon.jit
def _from_lane_before(x):
    """``x [rows, 4]`` rotated by one lane: lane ``i`` gets the value of lane ``(i + 3) % 4``."""
    return gl.inline_asm_elementwise(
        """{
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        add.u32 lane, lane, 3;
        and.b32 lane, lane, 3;
        shfl.sync.idx.b32 $0, $1, lane, 0x1c1f, 0xffffffff;
        }""",
        "=r,r",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _code(x, scale):
    """The 16 bits of each ``x >= 0``, above ``_DROPPED`` others; ``scale`` adds to exponents."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.maximum(bits + (scale + (1 << (_DROPPED - 1)) - _LEAST), 0)


@gluon.jit
def block_sums(
    p, m, alpha, spilled, SCALED: gl.constexpr, WORDS: gl.constexpr, LANES: gl.constexpr
):
    """Sums of weights ``p [rows, KEYS]``, in the order of :func:`arranged_key`, by blocks.

    ``p`` is relative to ``m [rows]``, in base 2.  ``spilled [rows, 4]`` holds for each lane what
    the last of its blocks in the tile before spills into the next, relative to a maximum that is
    ``alpha [rows, 1]`` off.  Returns ``words [rows, 16]`` with sums of 32 blocks, what these are
    relative to, ``spilled`` of this tile, and :func:`lane_sums`.  With ``SCALED``, the largest sum
    of a row may be anything above 2^-120; else it must be near 1.
    """
    N: gl.constexpr = p.shape[0]
    even, odd = gl.split(p.reshape([N, 16, 4, 2]))
    x0, x2 = gl.split(gl.permute(even.reshape([N, 8, 2, 4]), (0, 1, 3, 2)))
    x1, x3 = gl.split(gl.permute(odd.reshape([N, 8, 2, 4]), (0, 1, 3, 2)))  # [N, 8, lane]
    first = x0 + x1 + x2
    # Of the PER_CMP strides of a block's last key, one belongs to the next block.
    own = gl.permute(first * 2.0 + x3, (0, 2, 1)).reshape([N, 4, 4, 2])
    even, odd = gl.split(own)  # blocks 0 2 4 6, 1 3 5 7
    after_even, after_odd = gl.split(gl.permute(x3, (0, 2, 1)).reshape([N, 4, 4, 2]))
    odd += after_even
    b04, b26 = gl.split(even.reshape([N, 4, 2, 2]))
    s15, s37 = gl.split(after_odd.reshape([N, 4, 2, 2]))
    b26 += s15
    b0, b4 = gl.split(b04)
    s3, s7 = gl.split(s37)
    b4 += s3
    last = gl.convert_layout(s7, LANES)
    # Every weight has been counted PER_CMP times by now.
    lanes = gl.sum(odd, 2) + gl.convert_layout(
        gl.sum(b26, 2) + b0 + b4, gl.SliceLayout(2, odd.type.layout)
    )
    lanes = (gl.convert_layout(lanes, LANES) + last) * 0.5
    lane = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    given = _from_lane_before(gl.where(lane == 3, spilled * alpha, last))
    b0 += gl.convert_layout(given, b0.type.layout)
    b04 = gl.join(b0, b4)
    even = gl.join(b04, gl.convert_layout(b26, b04.type.layout)).reshape([N, 4, 4])
    even = gl.convert_layout(even, odd.type.layout)
    scale = 0
    if SCALED:
        exponent = gl.max(gl.max(gl.maximum(even, odd), 2), 1).to(gl.int32, bitcast=True) >> 23
        m += gl.convert_layout((exponent - 127).to(gl.float32), m.type.layout)
        scale = gl.expand_dims(gl.expand_dims((127 - exponent) << 23, 1), 2)
    words = (_code(even, scale) >> _DROPPED) | ((_code(odd, scale) & _HELD) << (16 - _DROPPED))
    return gl.convert_layout(words.reshape([N, 16]), WORDS), m, last, lanes


@triton.jit
def block_sums_of(words):
    """Sums ``[rows, 2 n]`` of ``words [rows, n]``, divided by ``BLOCK_SUMS_SCALE``."""
    low = (words << _DROPPED) & _HELD
    high = (words >> (16 - _DROPPED)) & _HELD
    both = tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]])
    return both.to(tl.float32, bitcast=True)

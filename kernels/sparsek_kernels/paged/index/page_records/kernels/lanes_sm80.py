"""Registers of one warp: a tensor of 32 numbers is a register, a number for each thread (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LANES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def to_lanes(x):
    return gl.convert_layout(x, LANES, assert_trivial=True)


@gluon.jit
def of_lanes(x):
    """An integer, as a register of each thread."""
    return x + gl.zeros([32], gl.int32, LANES)


@gluon.jit
def shuffle(x, lane):
    """``x`` of the thread ``lane``."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane],
        dtype=x.dtype, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def shuffle_long(x, lane):
    """``x``, int64, of the thread ``lane``."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        mov.b64 {a, b}, $1;
        shfl.sync.idx.b32 a, a, $2, 31, 0xffffffff;
        shfl.sync.idx.b32 b, b, $2, 31, 0xffffffff;
        mov.b64 $0, {a, b};
        }
        """,
        "=l,l,r", [x, lane], dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(x, N: gl.constexpr):
    """Registers of ``[32, N]``, ``N`` a power of two up to 8."""
    if N == 1:
        words = (to_lanes(gl.reshape(x, [32])),)
    elif N == 2:
        a, b = gl.split(x)
        words = (to_lanes(a), to_lanes(b))  # type: ignore[assignment]
    else:
        low, high = gl.split(gl.permute(gl.reshape(x, [32, 2, N // 2]), [0, 2, 1]))
        words = unpack_half(low, N // 2) + unpack_half(high, N // 2)
    return words


@gluon.jit
def unpack_half(x, N: gl.constexpr):
    if N == 2:
        a, b = gl.split(x)
        words = (to_lanes(a), to_lanes(b))
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [32, 2, 2]), [0, 2, 1]))
        a, c = gl.split(a)
        b, d = gl.split(b)
        words = (to_lanes(a), to_lanes(c), to_lanes(b), to_lanes(d))  # type: ignore[assignment]
    return words


@gluon.jit
def halves(word, DTYPE: gl.constexpr):
    """The two 16-bit floats of a word, float32."""
    low = word.to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    high = (word >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def pair_of_fp16(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def halves_of_bytes(word):
    """Four float16 numbers in two words: each byte of ``word`` becomes the high byte of one."""
    return gl.inline_asm_elementwise(
        "{ prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424; }", "=&r,=&r,r", [word],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_halves(x0, y0, x1, y1, b0, b1, c0, c1, c2, c3):
    """Float16 numbers of two records (8 rows each) times 8 columns over 16 channels."""
    return gl.inline_asm_elementwise(
        """
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};
        """,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [x0, y0, x1, y1, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def highest_of_rows(x):
    """The largest of the threads that differ in ``g``."""
    lane = gl.arange(0, 32, layout=LANES)
    x = gl.maximum(x, shuffle(x, lane ^ 4))
    x = gl.maximum(x, shuffle(x, lane ^ 8))
    return gl.maximum(x, shuffle(x, lane ^ 16))

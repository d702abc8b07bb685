"""The mean value of segments, from their records (``record.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged import record

SEGMENT: tl.constexpr = tl.constexpr(record.SEGMENT)


@triton.jit
def load_value_means(records, here, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Levels ``[P, BLOCK_D]`` int16 and scales ``[P]`` float32 of the mean values of segments.

    A mean value is ``(level - 7.5) * scale``.

    Args:
        records: ``[P]`` pointers to the bytes of the segments' records.
        here: ``[P]``, which of them are read; the others' levels and scales are 0.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    VALUE: tl.constexpr = 21 * HALF
    SCALE: tl.constexpr = 45 * (HALF // 2) + 34
    offs_d = tl.arange(0, BLOCK_D)
    mask = here[:, None] & (offs_d < HEAD_DIM)[None, :]
    packed = tl.load(records[:, None] + (VALUE + offs_d % HALF)[None, :], mask=mask, other=0)
    shift = tl.where(offs_d < HALF, 0, 4).to(tl.int16)
    levels = (packed.to(tl.int16) >> shift[None, :]) & 15
    if SCALE % 4 == 2:  # four bytes: what copies ahead take
        words = (records + (SCALE - 2)).to(tl.pointer_type(tl.int32), bitcast=True)
        half = (tl.load(words, mask=here, other=0) >> 16).to(tl.int16)
        scale = half.to(tl.float16, bitcast=True)
    else:
        scales = (records + SCALE).to(tl.pointer_type(tl.float16), bitcast=True)
        scale = tl.load(scales, mask=here, other=0.0)
    return levels, scale.to(tl.float32)

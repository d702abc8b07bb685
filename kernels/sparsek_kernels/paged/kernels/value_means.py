"""The mean value of segments, from their records (``record.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged import record

SEGMENT: tl.constexpr = tl.constexpr(record.SEGMENT)


@triton.jit
def load_value_means(records, here, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Means of V of the segments whose records these point at: ``[P, BLOCK_D]`` float32.

    Args:
        records: ``[P]`` pointers to bytes.
        here: ``[P]``, which of them are read; the others' means are 0.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    VALUE: tl.constexpr = 21 * HALF
    SCALE: tl.constexpr = 45 * (HALF // 2) + 34
    offs_d = tl.arange(0, BLOCK_D)
    mask = here[:, None] & (offs_d < HEAD_DIM)[None, :]
    packed = tl.load(records[:, None] + (VALUE + offs_d % HALF)[None, :], mask=mask, other=0)
    level = (packed.to(tl.int32) >> (offs_d // HALF * 4)[None, :]) & 15
    scales = (records + SCALE).to(tl.pointer_type(tl.float16), bitcast=True)
    scale = tl.load(scales, mask=here, other=0.0).to(tl.float32)
    return (level.to(tl.float32) - 7.5) * scale[:, None]

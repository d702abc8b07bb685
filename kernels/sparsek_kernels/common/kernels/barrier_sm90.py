"""Barriers of rings of buffers, for Hopper's kernels (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring_barriers(BUFFERS: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Barriers ``(full, empty) [BUFFERS, 1]`` of a ring.

    A buffer is full after ``FULL`` arrivals, and empty after ``EMPTY``.
    """
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], bar)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=EMPTY)
    return full, empty

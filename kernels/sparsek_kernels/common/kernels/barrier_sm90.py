"""Barriers of Hopper's kernels (Gluon): of a partition's threads, and of rings of buffers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Triton 3.6 calls it thread_barrier, later versions barrier.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


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

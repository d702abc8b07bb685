"""The barrier of a partition's threads, under the name that the installed Triton has for it."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# Triton 3.6 calls it thread_barrier, later versions barrier.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

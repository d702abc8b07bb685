"""Gluon's functions whose names differ between versions of Triton, from 3.6 to 3.9."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

_LOADS = hasattr(tma, "async_load")  # from 3.8 on; 3.9 has no other names
tma_load = tma.async_load if _LOADS else tma.async_copy_global_to_shared
tma_store = tma.async_store if _LOADS else tma.async_copy_shared_to_global
async_load = async_copy.async_load if _LOADS else async_copy.async_copy_global_to_shared

_MEMORY = gl.shared_memory_descriptor
# Takes the memory, then the dtype, the shape and the layout to see it in.
reinterpret = _MEMORY.reinterpret if hasattr(_MEMORY, "reinterpret") else _MEMORY._reinterpret

"""Shared memory full of NaN before every launch, for kernels that read what they never wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.common.kernels.gluon_names import thread_barrier

ROW = 1024
"""Words that a program writes at once."""


@gluon.jit
def fill_shared_memory_kernel(sink_ptr, value, ROWS: gl.constexpr, ROW: gl.constexpr):
    """Write ``value`` to 7/4 of ``ROWS`` rows of shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    half: gl.constexpr = ROWS // 2
    quarter: gl.constexpr = ROWS // 4
    first = gl.allocate_shared_memory(gl.int32, [ROWS, ROW], shared)
    second = gl.allocate_shared_memory(gl.int32, [half, ROW], shared)
    third = gl.allocate_shared_memory(gl.int32, [quarter, ROW], shared)
    words = gl.full([ROW], value, gl.int32, layout)
    for row in range(quarter):
        for copy in gl.static_range(4):
            first.index(4 * row + copy).store(words)
        for copy in gl.static_range(2):
            second.index(2 * row + copy).store(words)
        third.index(row).store(words)
    thread_barrier()
    kept = first.index(0).load(layout) + second.index(0).load(layout) + third.index(0).load(layout)
    offs = gl.arange(0, ROW, layout)
    gl.store(sink_ptr + offs, kept, mask=kept == 1)


@contextmanager
def poisoned_shared_memory() -> Iterator[None]:
    """Before every Triton kernel, fill the shared memory of all multiprocessors with NaN.

    All bits are set: NaN in every float format.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    most = properties.shared_memory_per_block_optin // (4 * ROW)
    rows = 1 << (most * 4 // 7).bit_length() - 1
    sink = torch.zeros(ROW, dtype=torch.int32, device="cuda")
    busy = False

    def fill(_: Any) -> None:
        nonlocal busy
        if busy:
            return
        busy = True
        try:
            grid = (4 * properties.multi_processor_count,)
            fill_shared_memory_kernel[grid](sink, -1, rows, ROW, num_warps=4)
        finally:
            busy = False

    knobs.runtime.launch_enter_hook.add(fill)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(fill)

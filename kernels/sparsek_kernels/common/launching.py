"""Launches of a compiled kernel that skip the JIT's analysis of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsek_kernels.common.device import current_stream
from sparsek_kernels.common.recording import has_launch_hook


def strides(*tensors: torch.Tensor, dims: int = 4) -> tuple[int, ...]:
    """Strides of the first ``dims`` dimensions of each tensor, one tensor after another."""
    return tuple(stride for x in tensors for stride in x.stride()[:dims])


def octet_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides of each ``[B, N, H, D]`` tensor but the last, in groups of eight elements."""
    return tuple(stride // 8 for stride in strides(*tensors, dims=3))


class CompiledLaunch:
    """One compiled kernel with its grid and every argument after the pointers.

    Replaying costs a few microseconds less than a launch through the JIT, which looks at each
    argument.  Valid while pointers are
    aligned to 16 bytes, as at the first launch.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        num_pointers: int,
        tail: tuple[Any, ...],
        device: int,
    ) -> None:
        self.num_pointers = num_pointers
        self._run = compiled.run
        self._head = (compiled.function, compiled.packed_metadata, None, None, None)
        self._grid = grid
        self._tail = tail
        self._device = device

    def __call__(self, *pointers: int) -> None:
        self._run(*self._grid, current_stream(self._device), *self._head, *pointers, *self._tail)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    pointers: Sequence[torch.Tensor],
    scalars: tuple[Any, ...],
    constexprs: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
    **options: Any,
) -> CompiledLaunch | None:
    """Launch ``kernel`` and return a replayable handle (``None`` in the interpreter).

    ``constexprs`` must be in the order of the kernel's signature, after the scalars; ``options``
    are further options of the compiler.
    """
    compiled = kernel[grid](
        *pointers, *scalars, **constexprs, num_warps=num_warps, num_stages=num_stages, **options
    )
    if compiled is None or has_launch_hook() or not pointers[0].is_cuda:
        return None
    tail = (*scalars, *constexprs.values())
    return CompiledLaunch(compiled, grid, len(pointers), tail, pointers[0].device.index)

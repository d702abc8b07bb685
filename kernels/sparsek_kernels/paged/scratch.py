"""Scratch memory that outlives a call, and launch options, for all launchers."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import device_arch
from sparsek_kernels.paged.config import is_hopper, next_power_of_2

_ROW_ELEMENTS = 1 << 24
"""Most elements (64 MiB) of a scratch tensor of a step that is handled token by token."""
MOST_ROWS = 1 << 15
"""Tokens of one launch; a grid's third dimension ends at 65535."""


def rows_per_step(width: int) -> int:
    """Tokens of one step that is handled token by token, with ``width`` elements for each."""
    return min(max(_ROW_ELEMENTS // width // 16, 1) * 16, MOST_ROWS)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Compile and launch options that let a kernel start while its predecessor drains."""
    use = device.type == "cuda" and is_hopper(device_arch(device))
    return {"OVERLAP": True, "launch_pdl": True} if use else {"OVERLAP": False}


_workspaces: dict[tuple[torch.device, str, int], torch.Tensor] = {}


def workspace(device: torch.device, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat zero-initialised scratch of at least ``numel`` elements, kept for later calls.

    Sizes are rounded up to powers of two and never freed, so that captured graphs keep valid
    addresses.  A first use under capture belongs to that graph alone.
    """
    size = next_power_of_2(max(numel, 1024))
    key = (device, name, size)
    found = _workspaces.get(key)
    if found is None:
        found = torch.zeros(size, device=device, dtype=dtype)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _workspaces[key] = found
    return found

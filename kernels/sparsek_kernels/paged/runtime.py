"""What launchers share: device traits, scratch that outlives a call, launch options."""

from __future__ import annotations

from functools import cache

import torch

from sparsek_kernels.paged.config import is_hopper, next_power_of_2

LOG2E = 1.4426950408889634


@cache
def device_traits(index: int) -> tuple[int, int]:
    """``(compute capability as major * 10 + minor, multiprocessors)`` of a CUDA device."""
    if not torch.cuda.is_available():
        return 80, 4
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def traits(device: torch.device) -> tuple[int, int]:
    return device_traits(device.index or 0)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Compile and launch options that let a kernel start while its predecessor drains."""
    use = device.type == "cuda" and is_hopper(traits(device)[0])
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

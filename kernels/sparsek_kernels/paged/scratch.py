"""Scratch memory that outlives a call, and launch options, for all launchers."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import current_stream, device_arch
from sparsek_kernels.paged.config import next_power_of_2, overlaps

_ROW_ELEMENTS = 1 << 24
"""Most elements (64 MiB) of a scratch tensor of a step that is handled token by token."""
MOST_ROWS = 1 << 15
"""Tokens of one launch; a grid's third dimension ends at 65535."""


def rows_per_step(width: int) -> int:
    """Tokens of one step that is handled token by token, with ``width`` elements for each."""
    return min(max(_ROW_ELEMENTS // width // 16, 1) * 16, MOST_ROWS)


def overlap_options(device: torch.device, allowed: bool = True) -> dict[str, bool]:
    """Compile and launch options that let a kernel start while its predecessor drains."""
    use = allowed and device.type == "cuda" and overlaps(device_arch(device))
    return {"OVERLAP": True, "launch_pdl": True} if use else {"OVERLAP": False}


_users: dict[int, torch.cuda.Stream] = {}
"""By device, the stream whose calls used the scratch last."""


def take_turns(device: int) -> int:
    """A device's current stream, which now waits for the one that used the scratch before it.

    Streams share scratch, so that it is there once, whatever streams a server warms up and captures
    on.  Nothing waits while a graph is captured: whoever replays it orders it beside other calls.
    """
    before, now = _users.get(device), current_stream(device)
    if before is not None and before.cuda_stream == now:
        return now
    if not torch.cuda.is_current_stream_capturing():
        stream = _users[device] = torch.cuda.current_stream(device)
        if before is not None:
            stream.wait_stream(before)
    return now


_workspaces: dict[tuple[torch.device, str, int], torch.Tensor] = {}


def workspace(device: torch.device, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat zero-initialised scratch of at least ``numel`` elements, kept for later calls.

    Sizes are rounded up to powers of two and never freed, so that captured graphs keep valid
    addresses.  A first use under capture belongs to that graph alone.  Streams take turns
    (:func:`take_turns`); threads must not call at the same time.

    Tickets are zero between kernels: who draws the last one clears it.  A kernel that is aborted
    leaves others, which nobody meets: CUDA launches nothing more in a process whose kernel failed.
    """
    if device.type == "cuda":
        take_turns(device.index)
    size = next_power_of_2(max(numel, 1024))
    key = (device, name, size)
    found = _workspaces.get(key)
    if found is None:
        found = torch.zeros(size, device=device, dtype=dtype)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _workspaces[key] = found
    return found


def held_bytes(device: torch.device) -> int:
    """Bytes of scratch that calls on a device, or of its kind where it has no index, have left."""
    index = device.index
    found = (x for x in _workspaces.values() if x.device.type == device.type)
    return sum(x.nbytes for x in found if index is None or x.device.index == index)

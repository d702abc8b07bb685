"""Repeated eager calls of the same shape, without the checks and the launch analysis.

A small attention takes a few microseconds on the GPU, less than Python needs to look at its
arguments.  A call without gradients whose shapes, strides, dtypes and options were seen before is
therefore replayed: two allocations and one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sparsek_kernels.common.device import REFUSALS, current_device, dispatch_modes, transformed
from sparsek_kernels.sink_window.spec import MOST_SEQUENCES

if TYPE_CHECKING:
    from sparsek_kernels.common.recording import Replay, Tensors

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 512
_replays: dict[Hashable, Replay | None] = {}
"""By key; ``None`` where Triton's launcher refused."""


def replay_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Hashable
) -> Hashable | None:
    """The key of a call's launch, or ``None`` for a call that must be checked and analysed."""
    if not (type(q) is type(k) is type(v) is torch.Tensor and q.is_cuda):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    device = q.get_device()
    if (
        device != current_device()
        or q.shape[0] > MOST_SEQUENCES  # several launches, which need not all be recorded
        or dispatch_modes()
        or transformed()
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    ):
        return None
    return (
        device, k.get_device(), v.get_device(), q.dtype, k.dtype, v.dtype,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        options,
    )  # fmt: skip


def replay(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Run a remembered launch on new tensors; ``None`` when ``key`` is new, or was refused."""
    found = _replays.get(key)
    if found is None:
        return None
    out, lse = q.new_empty(q.shape), None
    if return_lse:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    try:
        found((out, lse, q, k, v), q.get_device())
    except REFUSALS as error:
        logger.warning("no replay, which costs host time: Triton's launcher says %s", error)
        _replays[key] = None
        return None
    return out if lse is None else (out, lse)


@contextmanager
def remembered(key: Hashable, tensors: Tensors) -> Iterator[None]:
    """Keep what is launched meanwhile for :func:`replay`; the memory starts over when full.

    Args:
        tensors: out, lse or ``None``, q, k and v.
    """
    from sparsek_kernels.common.recording import has_launch_hook, recording

    with recording(tensors) as record:
        yield
    launches = record.finish()
    if launches is None or has_launch_hook() or key in _replays:
        return
    if len(_replays) >= _MAX_REMEMBERED:
        _replays.clear()
    _replays[key] = launches

"""Calls whose launches are replayed: from a step's second layer on, nothing goes through the JIT.

What a layer launches follows from its policy, from the batch and from how its tensors lie.  Layers
that agree in these launch the same kernels with the same arguments, but for addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sparsek_kernels.common.device import current_device, dispatch_modes
from sparsek_kernels.common.recording import Replay, Tensors, has_launch_hook, recording
from sparsek_kernels.paged.batch import ALIGNMENT
from sparsek_kernels.paged.scratch import take_turns

_MOST_REPLAYS = 256

Replays = dict[Hashable, Replay | None]

_without_batch: Replays = {}
_refused: list[Exception] = []
"""Why Triton's launchers refused a replay, which is then the last one of the process."""


@dataclass(slots=True, eq=False)
class ReplayableCall:
    """A call, and what is remembered of calls with the same key.

    Args:
        tensors: what differs between calls with one key.
        addresses: where these begin; 0 stands for ``None``.
        key: all else that the call's launches depend on.
        replays: by key; ``None`` stands for launches that cannot be replayed.
        device: where the call is launched.
    """

    tensors: Tensors
    addresses: Sequence[int]
    key: Hashable
    replays: Replays
    device: int

    def replay(self) -> bool:
        """Launch again what was launched with this key; ``False`` if nothing is remembered.

        Triton's launchers are no public interface.  Where they do not take the arguments of a
        replay, a warning says so, and this call and all later ones go through the JIT.
        """
        found = self.replays.get(self.key)
        if found is None:
            return False
        stream = take_turns(self.device)
        try:
            found.launch(self.addresses, stream)
        except (TypeError, ValueError, AttributeError, SystemError) as error:
            _refused.append(error)
            self.replays[self.key] = None
            warnings.warn(
                f"launches are not replayed, which costs host time: Triton says {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        return True

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember what is launched meanwhile, unless that was in vain before."""
        if self.key in self.replays:
            yield
            return
        with recording(self.tensors) as record:
            yield
        if len(self.replays) >= _MOST_REPLAYS:
            self.replays.clear()
        self.replays[self.key] = record.finish()
        if record.ambiguous:
            warnings.warn(
                "launches of a layer are not replayed, which costs host time: its tensors share an "
                "address or a storage, so that which of them an argument follows cannot be told",
                RuntimeWarning,
                stacklevel=3,
            )


def replayable(
    tensors: Tensors, options: Hashable, replays: Replays | None = None
) -> ReplayableCall | None:
    """The call on these tensors; ``None`` for one that must go through the JIT.

    That is a call under a dispatch mode (fake tensors) or a launch hook, with addresses that are
    not aligned, while a CUDA graph is captured, whose replays cost no host time, or after a replay
    was refused.

    Args:
        tensors: what the launches read and write; the first is on a GPU.
        options: all else that they depend on.
        replays: keeps the launches; ``None`` where they have no tensors but these.
    """
    device = current_device()
    if (
        _refused
        or dispatch_modes()
        or torch.cuda.is_current_stream_capturing()
        or has_launch_hook()
    ):
        return None
    key: list[Hashable] = [device, options]
    addresses = []
    together = 0
    for tensor in tensors:  # every layer comes here: each of these calls takes a tenth of a us
        if tensor is None:
            key.append(None)
            addresses.append(0)
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.get_device() != device:
            return None
        address = tensor.data_ptr()
        addresses.append(address)
        together |= address
        key += (tensor.shape, tensor.stride(), tensor.dtype)
    if together % ALIGNMENT:
        return None
    mine = _without_batch if replays is None else replays
    return ReplayableCall(tensors, addresses, tuple(key), mine, device)

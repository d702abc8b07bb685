"""Calls whose launches are replayed: from a step's second layer on, nothing goes through the JIT.

What a layer launches follows from its policy, from the batch and from how its tensors lie.  Layers
that agree in these launch the same kernels with the same arguments, but for addresses.  Decodes
beside prompts repeat the launches of other steps too, whose batches differ in addresses alone
(:attr:`Segment.lasting`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_

import torch

from sparsek_kernels.common.device import REFUSALS, current_device, dispatch_modes
from sparsek_kernels.common.recording import Replay, Tensors, has_launch_hook, recording
from sparsek_kernels.paged.batch import ALIGNMENT
from sparsek_kernels.paged.operands import Located
from sparsek_kernels.paged.scratch import take_turns

_MOST_REPLAYS = 256

logger = logging.getLogger(__name__)

Replays = dict[Hashable, Replay | str | None]
"""Launches by key; ``None``, or the reason, for those that cannot be replayed."""

_SHARED = (
    "its tensors share an address or a storage, so that which of them an argument follows cannot "
    "be told"
)
_UNALIGNED = f"an address of its tensors is no multiple of {ALIGNMENT}"

_without_batch: Replays = {}
_refused: list[str] = []
"""Why Triton's launchers refused a replay, which is then the last one of the process."""
_launched: Counter[str] = Counter()


def launched_counts() -> dict[str, int]:
    """Calls that were not replayed since the process started, by a reason that is no rule's."""
    return dict(_launched)


def _count(reason: str) -> None:
    """Count one call that is not replayed; the first one of a reason is logged."""
    if not _launched[reason]:
        logger.warning("SPARSEK does not replay a layer, which costs host time: %s", reason)
    _launched[reason] += 1


@dataclass(slots=True, eq=False)
class ReplayableCall:
    """A call, and what is remembered of calls with the same key.

    Args:
        located: the tensors that differ between calls with one key.
        key: all else that the call's launches depend on.
        replays: keeps the launches.
    """

    located: Located
    key: Hashable
    replays: Replays

    def replay(self) -> bool:
        """Launch again what was launched with this key; ``False`` if nothing is remembered.

        Triton's launchers are no public interface.  Where they do not take the arguments of a
        replay, this call and all later ones go through the JIT, which is logged and counted.
        """
        found = self.replays.get(self.key)
        if found is None:
            return False
        if isinstance(found, str):
            _count(found)
            return False
        stream = take_turns(self.located.device)
        try:
            found.launch(self.located.addresses, stream)
        except REFUSALS as error:
            _refused.append(f"Triton says {error}")
            self.replays[self.key] = None
            _count(_refused[0])
            return False
        return True

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember what is launched meanwhile, unless that was in vain before."""
        if self.key in self.replays:
            yield
            return
        with recording(self.located.tensors) as record:
            yield
        if record.empty:  # kernels were compiled, as at a server's start, and nothing launched
            return
        if len(self.replays) >= _MOST_REPLAYS:
            self.replays.clear()
        self.replays[self.key] = record.finish()
        if record.ambiguous:
            self.replays[self.key] = _SHARED
            _count(_SHARED)


def locate(tensors: Tensors, known: Located | None = None) -> Located | None:
    """Where these tensors are; ``None`` where their calls must go through the JIT.

    That is under a dispatch mode (fake tensors have no address), with addresses that are not
    aligned, or with what is no tensor of the current GPU.

    Args:
        tensors: what launches read and write.
        known: where the first of them are; of no use where these are others.
    """
    if dispatch_modes():
        return None
    device = current_device()
    key: list[Hashable] = [device]
    addresses: list[int] = []
    if known is not None and known.device == device and all(map(is_, known.tensors, tensors)):
        key, addresses = [*known.key], [*known.addresses]
    together = 0
    for tensor in tensors[len(addresses) :]:  # each of these calls takes a tenth of a us, a layer
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
        _count(_UNALIGNED)
        return None
    return Located(tensors, addresses, tuple(key), device)


def replayable(
    located: Located, options: Hashable, replays: Replays | None = None
) -> ReplayableCall | None:
    """The call on these tensors; ``None`` for one that must go through the JIT.

    That is a call under a dispatch mode or a launch hook, for another GPU than the current one,
    while a CUDA graph is captured, whose replays cost no host time, or after a replay was refused.

    Args:
        located: what the launches read and write.
        options: all else that they depend on.
        replays: keeps the launches; ``None`` where they have no tensors but these.
    """
    if (
        dispatch_modes()
        or located.device != current_device()
        or torch.cuda.is_current_stream_capturing()
        or has_launch_hook()
    ):
        return None
    if _refused:
        _count(_refused[0])
        return None
    mine = _without_batch if replays is None else replays
    return ReplayableCall(located, (located.key, options), mine)

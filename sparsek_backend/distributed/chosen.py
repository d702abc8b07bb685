"""Keys of the blocks that a rank's queries chose, of all blocks before them.

A segment's keys are the blocks before its first that any of its queries chose, then its own tokens
from the start of that first block on.  Blocks keep their order and the queries stay last, so that
causality holds in what is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparsek_backend.distributed.exchange import Fetch
from sparsek_backend.distributed.layouts import Segment, SequenceLayout
from sparsek_backend.distributed.mesh import Channel
from sparsek_backend.distributed.nsa_plan import Group
from sparsek_backend.distributed.rows import Range, plan_transfers


class Chosen(NamedTuple):
    """Blocks of some tensors, put together, and which of them each query chose, if it has."""

    tensors: tuple[torch.Tensor, ...]
    block_indices: torch.Tensor | None


def fetch_chosen(
    channel: Channel,
    layout: SequenceLayout,
    groups: Sequence[Group],
    indices: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    sel_block_size: int,
) -> list[Chosen]:
    """The blocks of ``tensors`` that each group's queries chose.

    All ranks call this; each waits for its GPU, and tells the others what it asks for.

    Args:
        indices: blocks that each group's queries chose, ``[B, N, Hkv, S]`` int32.
        tensors: this rank's rows, ``[B, rows, H, D]`` each.
    """
    asked: list[list[Range]] = []
    places: list[torch.Tensor] = []
    for group, blocks in zip(groups, indices, strict=True):
        first = group.segments[0]
        if first.start == first.sequence:  # no token lies before the group's own
            ranges, place = [(x.start, x.stop) for x in group.segments], blocks
        else:
            ranges, place = _before_and_own(first, blocks, sel_block_size)
        asked.append(ranges)
        places.append(place)
    transfers = plan_transfers(layout.ownership, channel.told(asked), channel.rank)
    found = Fetch(channel, transfers, tensors).wait()
    return [Chosen(*x) for x in zip(found, places, strict=True)]


def _before_and_own(
    segment: Segment, blocks: torch.Tensor, size: int
) -> tuple[list[Range], torch.Tensor]:
    """Ranges to fetch for a later segment of a sequence, and the chosen blocks' places there."""
    own = (segment.start - segment.sequence) // size
    count = -(-(segment.stop - segment.sequence) // size)
    blocks = blocks.long()  # -1, for none, is the last of the following
    wanted = torch.zeros(count + 1, dtype=torch.bool, device=blocks.device)
    wanted[blocks.flatten()] = True
    wanted[own:] = True
    place = wanted.cumsum(0).int() - 1
    place[-1] = -1
    before = wanted[:own].nonzero().flatten().tolist()
    starts = [segment.sequence + block * size for block in before]
    ranges = [(start, start + size) for start in starts]
    return [*ranges, (segment.sequence + own * size, segment.stop)], place[blocks]

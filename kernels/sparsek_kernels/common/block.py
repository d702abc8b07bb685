"""Where tensors lie in one block of memory, of which those that are needed at other times share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparsek_kernels.common.shapes import cdiv

_ALIGNED = 512  # as PyTorch's allocator for GPUs aligns


class Need(NamedTuple):
    """A tensor: its bytes, and the first and the last step that reads or writes it."""

    size: int
    first: int
    last: int


def offsets_in_block(needs: Sequence[Need]) -> tuple[list[int], int]:
    """Offset of each tensor, and bytes of the block; no two share a byte in the same step.

    The largest come first, each at the lowest offset that is free for as long as it is needed.
    """
    offsets = [0] * len(needs)
    placed: list[int] = []
    for index in sorted(range(len(needs)), key=lambda i: -needs[i].size):
        need, offset = needs[index], 0
        for other in sorted(placed, key=offsets.__getitem__):
            apart = needs[other].last < need.first or need.last < needs[other].first
            if apart or offsets[other] >= offset + need.size:
                continue
            end = offsets[other] + needs[other].size
            offset = max(offset, cdiv(end, _ALIGNED) * _ALIGNED)
        offsets[index] = offset
        placed.append(index)
    return offsets, max((offsets[i] + need.size for i, need in enumerate(needs)), default=0)

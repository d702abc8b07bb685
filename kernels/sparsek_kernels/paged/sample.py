"""A sample of cells: how many of each key are kept, with what weight, and the entries of a list.

The rule is docs/selection.md, "By records".  A list's *entry* is a cell and the log of its weight:
``cell + (steps << CELL_BITS)``, with a weight of ``2 ** (steps / STEPS)``.  So a cell's number
alone is an entry of weight 1.  Places that are not filled hold -1.
"""

from __future__ import annotations

import torch

CELL_BITS = 21
"""Bits of a cell's number in an entry; the 10 above are its weight's."""
STEPS = 32
"""Steps of a weight's log in an octave."""
WHOLE_BITS = 16
"""Bits behind the point of probabilities."""
THREADS = 8
"""A segment's cells come in the order 0, 8, 16, 24, 1, 9, ...: as this many threads hold them."""
MOST_CELLS = (1 << (31 - WHOLE_BITS)) - 1
"""Places of a list at most, so that sums of probabilities are 32-bit integers."""
SPREAD = 0x9E3779B1
"""The golden ratio, of ``2 ** 32``: multiples of it are spread evenly."""


def start_of(position: int) -> int:
    """What a running sum of probabilities starts from, of ``2 ** WHOLE_BITS``: spread evenly.

    ``position`` is of the first token that chooses.
    """
    return (position * SPREAD & 0xFFFFFFFF) >> (32 - WHOLE_BITS)


def weight_steps(counts: torch.Tensor, places: int) -> torch.Tensor:
    """Steps ``[..., KEYS]`` int32 of the weights of cells of each key.

    ``counts [..., KEYS]`` are how many there are of each: more in all than ``places`` for them.
    """
    keys = torch.arange(counts.shape[-1])
    sizes = (keys.double() / 4.0).exp2()
    larger = counts.flip(-1).cumsum(-1).flip(-1) - counts  # cells of larger keys
    until = (counts * sizes).cumsum(-1)
    whole = (larger + until / sizes < places).sum(-1, keepdim=True)  # keys kept for certain
    some = keys < counts.shape[-1] - whole
    certain = torch.where(some, 0, counts).sum(-1, keepdim=True)
    rest = torch.where(some, counts * sizes, 0.0).sum(-1, keepdim=True)
    # Where T is the size of a key, the last bits of a sum do not decide.
    threshold = (STEPS * (rest / (places - certain)).log2() - 1e-6).ceil().int()
    return (threshold - STEPS // 4 * keys).clamp(min=0).int()


def probabilities(steps: torch.Tensor) -> torch.Tensor:
    """Probabilities, int32 of ``2 ** WHOLE_BITS``, of cells whose weights have these steps."""
    return (2.0 ** (WHOLE_BITS - steps.double() / STEPS)).floor().int()


def sample_cells(keys: torch.Tensor, counts: torch.Tensor, places: int, start: int) -> torch.Tensor:
    """A list's entries ``[places]`` int32, cells counted from the first one.

    ``keys [S, 32]`` are of far segments' cells, ``counts [KEYS]`` how many there are of each,
    ``start`` is :func:`start_of`.
    """
    segments, cells = keys.shape
    order = torch.arange(cells).view(-1, THREADS).T.flatten()
    steps = weight_steps(counts, places)
    each = probabilities(steps)[keys[:, order]].flatten().long()
    until = each.cumsum(0) + start
    place = (until - each) >> WHOLE_BITS
    kept = ((until >> WHOLE_BITS) > place) & (place < places)
    cell = (torch.arange(segments)[:, None] * cells + order).flatten()
    entries = torch.full((places,), -1, dtype=torch.int32)
    found = cell + (steps[keys[:, order]].flatten().long() << CELL_BITS)
    entries[place[kept]] = found[kept].int()
    return entries

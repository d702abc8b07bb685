"""A sample of cells or blocks: how many of each key are kept, with what weight, and list entries.

The rule is docs/selection.md, "A sample".  A list's *entry* is a cell (or block) and the log of its
weight: ``cell + (steps << CELL_BITS)``, with a weight of ``2 ** (steps / STEPS)``.  So a cell's
number alone is an entry of weight 1.  Places that are not filled hold -1.
"""

from __future__ import annotations

from math import log2

import torch

CELL_BITS = 21
"""Bits of a cell's number in an entry; the 10 above are its weight's."""
CELL_MASK = (1 << CELL_BITS) - 1
STEPS = 32
"""Steps of a weight's log in an octave."""
MOST_STEPS = 32 * STEPS - 1
"""Most steps of an entry."""
KEYS = 64
"""Integer keys: four for each of 16 octaves of scores."""
WHOLE_BITS = 16
"""Bits behind the point of probabilities."""
THREADS = 8
"""A segment's cells come in the order 0, 8, 16, 24, 1, 9, ...: as this many threads hold them."""
MOST_CELLS = (1 << (31 - WHOLE_BITS)) - 1
"""Places of a list at most, so that sums of probabilities are 32-bit integers."""
CANDIDATES = 2
"""Blocks of a tile that are weighed by their real keys, for each of its places."""
MOST_LISTED = (1 << 16) - 1
"""Most of them, as sums of their probabilities are 32-bit integers."""
SPREAD = 0x9E3779B1
"""The golden ratio, of ``2 ** 32``: multiples of it are spread evenly."""
SECOND_SPREAD = 0x6A09E667
"""The root of 2, of ``2 ** 32``: for samples of samples.  Pairs of multiples fill a square evenly,
so that one draw does not decide on the other."""


def first_key(places: int, rows: int) -> int:
    """What is taken from a float32 score's highest 11 bits, so that keys end at 63.

    Scores add up to ``rows`` at most, so one above ``rows / places`` is chosen in any case: the
    last key is for these.
    """
    octave = int(log2(max(places / rows, 1.0)))
    return ((127 - octave) << 2) - (KEYS - 1)


def keys_of(scores: torch.Tensor, places: int, rows: int) -> torch.Tensor:
    """Integer keys of float32 scores: their highest bits."""
    scores = scores.nan_to_num(0.0).clamp_(min=0.0)
    return ((scores.view(torch.int32) >> 21) - first_key(places, rows)).clamp_(0, KEYS - 1)


def start_of(position: int, spread: int = SPREAD) -> int:
    """What a running sum of probabilities starts from, of ``2 ** WHOLE_BITS``: spread evenly.

    ``position`` is of the first token that chooses.
    """
    return (position * spread & 0xFFFFFFFF) >> (32 - WHOLE_BITS)


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


def draw(
    keys: torch.Tensor, competing: torch.Tensor, places: int, starts: torch.Tensor
) -> torch.Tensor:
    """Samples of many lists of things with integer keys: entries ``[..., places]`` int64.

    An entry's number is the thing's place among the ``n``; entries come in that order, then -1.

    Args:
        keys: ``[..., n]`` int64.
        competing: ``[..., n]`` bool, which things are there at all.  Where there are no more than
            ``places``, all are kept.
        starts: ``[...]`` int64 of :func:`start_of`.
    """
    if not places:
        return keys[..., :0]
    counts = torch.zeros(*keys.shape[:-1], KEYS, dtype=torch.long)
    counts.scatter_add_(-1, keys, competing.long())
    some = (competing.sum(-1) > places)[..., None]
    steps = weight_steps(torch.where(some, counts, places + 1), places).long()  # any, where all are
    steps = torch.where(some, steps, 0)
    each = probabilities(steps).long().gather(-1, keys) * competing
    until = each.cumsum(-1) + starts[..., None]
    place = (until - each) >> WHOLE_BITS
    kept = ((until >> WHOLE_BITS) > place) & (place < places)
    found = torch.arange(keys.shape[-1]) + (steps.gather(-1, keys) << CELL_BITS)
    entries = torch.full((*keys.shape[:-1], places + 1), -1)
    entries.scatter_(-1, torch.where(kept, place, places), torch.where(kept, found, -1))
    return entries[..., :places]


def sample_cells(keys: torch.Tensor, places: int, start: int) -> torch.Tensor:
    """A list's entries ``[places]`` int32, cells counted from the first one.

    ``keys [S, 32]`` are of far segments' cells, ``start`` is :func:`start_of`.
    """
    cells = keys.shape[1]
    order = torch.arange(cells).view(-1, THREADS).T.flatten()
    ordered = keys[:, order].flatten().long()
    entries = draw(ordered, torch.ones_like(ordered, dtype=torch.bool), places, torch.tensor(start))
    turn = entries & CELL_MASK  # of a cell, in the order of drawing
    cell = turn - turn % cells + order[turn % cells]
    return torch.where(entries < 0, -1, cell + (entries - turn)).int()

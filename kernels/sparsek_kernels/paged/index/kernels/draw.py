"""Drawing cells or blocks: keys of scores, weights by how many there are of each, a sample.

The rule is docs/selection.md, "By records" and "Drawn blocks"; ``sample.py`` is its torch form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.sample import CELL_BITS as _CELL_BITS
from sparsek_kernels.paged.sample import KEYS as _KEYS
from sparsek_kernels.paged.sample import LEAST as _LEAST
from sparsek_kernels.paged.sample import MOST_STEPS as _MOST_STEPS
from sparsek_kernels.paged.sample import SPREAD as _SPREAD
from sparsek_kernels.paged.sample import STEPS as _STEPS
from sparsek_kernels.paged.sample import WHOLE_BITS as _WHOLE_BITS

CELL_BITS = tl.constexpr(_CELL_BITS)
KEYS = tl.constexpr(_KEYS)
LEAST = tl.constexpr(_LEAST)
MOST_STEPS = tl.constexpr(_MOST_STEPS)
SPREAD = tl.constexpr(_SPREAD)
STEPS = tl.constexpr(_STEPS)
WHOLE_BITS = tl.constexpr(_WHOLE_BITS)
CHUNK = tl.constexpr(1024)
"""Blocks whose first scores are read at a time."""


@triton.jit
def start_of(number):
    """What a running sum of probabilities starts from, of ``2**16``."""
    spread = number.to(tl.uint32) * SPREAD
    return (spread >> (32 - WHOLE_BITS)).to(tl.int32)


@triton.jit
def threshold_steps(counts, KEYS: tl.constexpr, COUNT):
    """``ceil(32 log2 T)`` of the rule, from how many cells there are of each key, ``[KEYS]``."""
    keys = tl.arange(0, KEYS)
    sizes = tl.exp2(keys.to(tl.float32) * 0.25)
    larger = tl.cumsum(counts, axis=0, reverse=True) - counts
    until = tl.cumsum(counts.to(tl.float32) * sizes, axis=0)
    some = larger.to(tl.float32) + until / sizes >= COUNT  # others are kept for certain
    certain = tl.sum(tl.where(some, 0, counts), axis=0)
    rest = tl.sum(tl.where(some, counts.to(tl.float32) * sizes, 0.0), axis=0)
    log = tl.log2(rest / (COUNT - certain).to(tl.float32))
    return tl.ceil(log * STEPS - 2e-4).to(tl.int32)  # what sums round may not pass a key's size


@triton.jit
def steps_and_shares(key, threshold, MOST: tl.constexpr):
    """Steps of the weights of cells with keys ``key``, and their probabilities of ``2**16``."""
    steps = tl.minimum(tl.maximum(threshold - key * (STEPS // 4), 0), MOST)
    part = (steps % STEPS).to(tl.float32) * (-1.0 / STEPS)
    return steps, tl.exp2(part + WHOLE_BITS).to(tl.int32) >> (steps // STEPS)


@triton.jit
def quarters_of(score):
    """Quarters of octaves of blocks' scores, as integers; NaN counts as the least score."""
    return tl.where(score > LEAST, score, LEAST).to(tl.int32, bitcast=True) >> 21


@triton.jit
def draw(key, there, threshold, total, COUNT):
    """Steps of the blocks that are there, which of them are drawn, and their shares.

    Args:
        total: the sum of the shares before them.
        COUNT: most that are drawn in all.
    """
    steps, share = steps_and_shares(key, threshold, MOST_STEPS)
    share = tl.where(there, share, 0)
    until = total + tl.cumsum(share, axis=0)
    place = (until - share) >> WHOLE_BITS
    return steps, (until >> WHOLE_BITS > place) & (place < COUNT), share


@triton.jit
def keys_below(best, score):
    """Keys of scores, the last one at ``best`` quarters of octaves."""
    return tl.maximum(KEYS - 1 - best + quarters_of(score), 0)


@triton.jit
def mark_listed(row, score, block, there, start, COUNT):
    """Draw ``COUNT`` of the candidates, and leave in ``row`` below -1 what is drawn: -2 - steps.

    The others, in whose place is -1, are then known as candidates too.
    """
    best = tl.max(tl.where(there, quarters_of(score), 0), axis=0)
    key = keys_below(best, score)
    threshold = threshold_steps(tl.histogram(key, KEYS, mask=there), KEYS, COUNT)
    steps, drawn, _share = draw(key, there, threshold, start, COUNT)
    tl.store(row + block, tl.where(drawn, -2.0 - steps, -1.0), mask=there)
    tl.debug_barrier()


@triton.jit
def write_drawn(out, row, score, block, there, first, last, tile, OTHERS, PLACES: tl.constexpr):
    """Write the entries of one tile's sample, ascending, then -1.

    One pass over ``row`` meets them all in order, of candidates and of other blocks.

    Args:
        out: ``[PLACES]``, the list.
        row: first scores of blocks, read from ``first`` to ``last``, overwritten for candidates.
        score, block, there: of the candidates, in ascending order; those that are there.
        tile: its number.
        OTHERS: places of blocks that are no candidates, not more than there are of them.
    """
    start = start_of(tile)
    mark_listed(row, score, block, there, start, PLACES - OTHERS)
    offs = tl.arange(0, CHUNK)
    best = 0
    for begin in tl.range(first, last, CHUNK):
        value = tl.load(row + begin + offs, mask=begin + offs < last, other=-1.0)
        best = tl.maximum(best, tl.max(tl.where(value < 0.0, 0, quarters_of(value)), axis=0))
    counts = tl.zeros([KEYS], dtype=tl.int32)
    for begin in tl.range(first, last, CHUNK):
        value = tl.load(row + begin + offs, mask=begin + offs < last, other=-1.0)
        other = (value >= 0.0) | (value != value)
        counts += tl.histogram(keys_below(best, value), KEYS, mask=other)
    threshold = 0
    if tl.sum(counts, axis=0) > OTHERS:
        threshold = threshold_steps(counts, KEYS, OTHERS)
    total = start
    filled = 0
    for begin in tl.range(first, last, CHUNK):
        value = tl.load(row + begin + offs, mask=begin + offs < last, other=-1.0)
        other = (value >= 0.0) | (value != value)
        steps, drawn, share = draw(keys_below(best, value), other, threshold, total, OTHERS)
        steps = tl.where(value < 0.0, -2.0 - value, steps).to(tl.int32)
        drawn = drawn | (value < -1.0)
        place = filled + tl.cumsum(drawn.to(tl.int32), axis=0) - 1
        tl.store(out + place, begin + offs + (steps << CELL_BITS), mask=drawn)
        total += tl.sum(share, axis=0)
        filled += tl.sum(drawn.to(tl.int32), axis=0)
    WIDTH: tl.constexpr = triton.next_power_of_2(PLACES)
    rest = tl.arange(0, WIDTH)
    tl.store(out + rest, rest * 0 - 1, mask=(rest >= filled) & (rest < PLACES))

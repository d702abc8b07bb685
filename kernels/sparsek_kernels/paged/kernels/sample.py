"""A sample of things with integer keys: weights, probabilities, entries (``paged/sample.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.sample import CELL_BITS as _CELL_BITS
from sparsek_kernels.paged.sample import CELL_MASK as _CELL_MASK
from sparsek_kernels.paged.sample import KEYS as _KEYS
from sparsek_kernels.paged.sample import MOST_STEPS as _MOST_STEPS
from sparsek_kernels.paged.sample import SECOND_SPREAD as _SECOND_SPREAD
from sparsek_kernels.paged.sample import SPREAD as _SPREAD
from sparsek_kernels.paged.sample import STEPS as _STEPS
from sparsek_kernels.paged.sample import WHOLE_BITS as _WHOLE_BITS

CELL_BITS = tl.constexpr(_CELL_BITS)
CELL_MASK = tl.constexpr(_CELL_MASK)
KEYS = tl.constexpr(_KEYS)
MOST_STEPS = tl.constexpr(_MOST_STEPS)
SECOND_SPREAD = tl.constexpr(_SECOND_SPREAD)
SPREAD = tl.constexpr(_SPREAD)
STEPS = tl.constexpr(_STEPS)
WHOLE_BITS = tl.constexpr(_WHOLE_BITS)


@triton.jit
def entry_of(entry):
    """What an entry names, and the binary log of its weight; of no entry 0 and ``-inf``."""
    steps = (entry >> CELL_BITS).to(tl.float32)
    return tl.maximum(entry, 0) & CELL_MASK, tl.where(entry >= 0, steps / STEPS, float("-inf"))


@triton.jit
def first_sum(position, SPREAD: tl.constexpr):
    """``sample.start_of``."""
    return (position.to(tl.uint32) * SPREAD >> (32 - WHOLE_BITS)).to(tl.int32)


@triton.jit
def first_key_of(places, rows):
    """``sample.first_key``."""
    share = tl.maximum(places // rows, 1).to(tl.float32)
    octave = share.to(tl.int32, bitcast=True) >> 23  # 127 more
    return ((254 - octave) << 2) - (KEYS - 1)


@triton.jit
def threshold_steps(counts, COUNT, KEYS: tl.constexpr):
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
def steps_and_shares(key, threshold):
    """Steps of the weights of cells with keys ``key``, and their probabilities of ``2**16``."""
    steps = tl.minimum(tl.maximum(threshold - key * (STEPS // 4), 0), MOST_STEPS)
    part = (steps % STEPS).to(tl.float32) * (-1.0 / STEPS)
    return steps, tl.exp2(part + WHOLE_BITS).to(tl.int32) >> (steps // STEPS)


@triton.jit
def draw(
    out_ptr, score, number, inside, start, known_steps, first_key, count,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a sample of ``count`` of more things ``inside``: entries in their order, then -1 up to
    ``WIDTH``.

    score, number: ``[BLOCK]``, how much each matters and what it is called in its entry.
    start: what the sum of probabilities starts from (``first_sum``).
    known_steps: ``[BLOCK]`` int32, steps of weights that things have already.
    """
    # NaN and negative scores count as zero.
    key = (tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True) >> 21) - first_key
    key = tl.minimum(tl.maximum(key, 0), KEYS - 1)
    threshold = threshold_steps(tl.histogram(key, KEYS, mask=inside), count, KEYS)
    steps, share = steps_and_shares(key, threshold)
    share = tl.where(inside, share, 0)
    until = start + tl.cumsum(share, axis=0)
    place = ((until - share).to(tl.uint32) >> WHOLE_BITS).to(tl.int32)
    until = (until.to(tl.uint32) >> WHOLE_BITS).to(tl.int32)
    drawn = inside & (until > place) & (place < count)
    steps = tl.minimum(steps + known_steps, MOST_STEPS)
    tl.store(out_ptr + place, number + (steps << CELL_BITS), mask=drawn)
    filled = ((start + tl.sum(share, axis=0)).to(tl.uint32) >> WHOLE_BITS).to(tl.int32)
    PLACES: tl.constexpr = triton.next_power_of_2(WIDTH)
    offs = tl.arange(0, PLACES)
    tl.store(
        out_ptr + offs, tl.full([PLACES], -1, tl.int32), mask=(offs >= filled) & (offs < WIDTH)
    )

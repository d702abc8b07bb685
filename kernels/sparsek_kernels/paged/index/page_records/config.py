"""How the records' kernels are launched: pure functions of shapes, dtype and architecture."""

from __future__ import annotations

from math import log2

from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

KEYS = 64
"""Integer keys of cells: four for each of 16 octaves of their scores."""
CHUNK = 64
"""Segments of a program that ranks cells."""
SEGMENTS_OF_PROGRAM = 64
NEAR_OF_PROGRAM = 4
"""Segments that a program of ``choose_cells_kernel`` keeps, or near ones that it reads."""


def first_key(policy: SelectionPolicy, rows: int) -> int:
    """What is taken from a float32 score's highest 11 bits, so that keys end at 63.

    The scores of a KV head add up to ``rows`` at most, so a cell above ``rows / top_k`` is chosen
    in any case: the last key is for these.

    Args:
        rows: tokens that choose together, times query heads that share a KV head.
    """
    octave = int(log2(max(policy.scored_blocks / rows, 1.0)))
    return ((127 - octave) << 2) - (KEYS - 1)


def group_programs(policy: SelectionPolicy, segments: int) -> int:
    """Programs of ``choose_cells_kernel`` that serve one token and KV head.

    Args:
        segments: of the longest context.
    """
    near = (policy.sink_blocks + policy.reach_blocks) // policy.segment_blocks + 1
    return ceil_div(near, NEAR_OF_PROGRAM) + ceil_div(segments, SEGMENTS_OF_PROGRAM)

"""How the records' kernels are launched: pure functions of shapes, dtype and architecture."""

from __future__ import annotations

from math import log2

from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

KEYS = 64
"""Integer keys of cells: four for each of 16 octaves of their scores."""
CHUNK = 64
"""Segments of a program that ranks cells."""


def uses_matrix_units(arch: int) -> bool:
    """Whether products of bytes weigh cells: on sm_8x and sm_9x, not where they have never run."""
    return 80 <= arch < 100


def first_key(policy: SelectionPolicy, rows: int) -> int:
    """What is taken from a float32 score's highest 11 bits, so that keys end at 63.

    The scores of a KV head add up to ``rows`` at most, so a cell above ``rows / top_k`` is chosen
    in any case: the last key is for these.

    Args:
        rows: tokens that choose together, times query heads that share a KV head.
    """
    octave = int(log2(max(policy.scored_blocks / rows, 1.0)))
    return ((127 - octave) << 2) - (KEYS - 1)


MOST_EACH = 16
"""Far segments of a program of ``weigh_cells_kernel`` where not all of them run at once."""


def weigh_shares(jobs: int, segments: int, near: int, multiprocessors: int) -> tuple[int, int]:
    """Programs of ``weigh_cells_kernel`` for the far segments of each job, at most, and the number
    of which a program's segments are a multiple.

    Those that find nothing cost time to start.  Where 32 segments each let all of them run at once,
    16 on a multiprocessor, there are no more than that, and short contexts are dealt out finely.

    Args:
        jobs: requests times KV heads and parts of columns.
        segments: of the longest context.
        near: programs of each job for near segments.
    """
    at_once = 16 * multiprocessors // jobs - near
    if 32 * at_once >= segments:
        return min(ceil_div(segments, 2), at_once), 2
    each = ceil_div(jobs * segments, 16 * multiprocessors)
    least = min(max(ceil_div(each, 8) * 8, 8), MOST_EACH)
    return min(ceil_div(segments, least), ceil_div(64 * multiprocessors, jobs)), least


def cut_segments(jobs: int, segments: int, columns: int, multiprocessors: int) -> int:
    """Segments of a program of ``cut_cells_kernel``: 64 to 512.

    As few as let all programs run at once, and no more than there is shared memory for.

    Args:
        jobs: requests times KV heads.
        segments: of the longest context.
    """
    size = 64
    while size < 512 and size * columns <= 2048:
        members = ceil_div(segments, size)
        # Programs of a job wait for one another: few of them are faster where that leaves enough.
        many = 2 if members > 8 and columns <= 8 else 4
        if jobs * members <= many * multiprocessors:
            break
        size *= 2
    return size

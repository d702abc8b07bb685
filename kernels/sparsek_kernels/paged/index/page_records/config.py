"""How the records' kernels are launched: pure functions of shapes, dtype and architecture."""

from __future__ import annotations

from sparsek_kernels.paged.policy import ceil_div

CHUNK = 64
"""Segments of a program that ranks cells."""


def uses_matrix_units(arch: int) -> bool:
    """Whether products of bytes weigh cells: on sm_8x and sm_9x, not where they have never run."""
    return 80 <= arch < 100


MOST_EACH = 16
"""Far segments of a program of ``weigh_cells_kernel`` where not all of them run at once."""


def weigh_shares(jobs: int, segments: int, near: int, multiprocessors: int) -> tuple[int, int]:
    """Programs of ``weigh_cells_kernel`` for the far segments of each job, and how many of them run
    at once.

    Those that find nothing cost time to start.  Where 40 segments each let all of them run at once,
    16 on a multiprocessor, there are no more than that.

    Args:
        jobs: requests times KV heads and parts of columns.
        segments: of the longest context.
        near: programs of each job for near segments.
    """
    at_once = max(16 * multiprocessors // jobs - near, 1)
    if 40 * at_once >= segments:
        programs = min(ceil_div(segments, 2), at_once)
    else:
        programs = min(ceil_div(segments, MOST_EACH), ceil_div(64 * multiprocessors, jobs))
    return programs, min(at_once, programs)


def cut_segments(jobs: int, segments: int, columns: int, multiprocessors: int) -> int:
    """Segments of a program of ``cut_cells_kernel``: 64 to 512.

    As few as let all programs run at once, and no more than there is shared memory for.  An eighth
    more is let pass: a server's contexts are a power of two and room for an answer.

    Args:
        jobs: requests times KV heads.
        segments: of the longest context.
    """
    size = 64
    while size < 512 and size * columns <= 2048:
        members = ceil_div(segments, size)
        # Programs of a job wait for one another: few of them are faster where that leaves enough.
        many = 2 if members > 8 and columns <= 8 else 4
        if 8 * jobs * members <= 9 * many * multiprocessors:
            break
        size *= 2
    return size

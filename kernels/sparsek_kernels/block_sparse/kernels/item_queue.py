"""In which order programs that draw their items take the rows of a pattern."""

import triton
import triton.language as tl


@triton.jit
def block_sparse_queue_kernel(
    queue_ptr, crow_ptr, num_rows, ROWS: tl.constexpr, SCAN: tl.constexpr
):
    """A queue: the ticket that is drawn next, 0, and the rows of each pattern.

    Rows with long lists come first, and of equals the last: a row's place is the number of those
    before it.  Grid: ``(cdiv(num_rows, ROWS), patterns)``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    pattern = tl.program_id(1)
    crow = crow_ptr + pattern * (num_rows + 1)
    exists = row < num_rows
    first = tl.load(crow + row, mask=exists, other=0)
    length = tl.load(crow + row + 1, mask=exists, other=0) - first
    place = tl.zeros([ROWS], tl.int32)
    for start in range(0, num_rows, SCAN):
        other = start + tl.arange(0, SCAN)  # [SCAN]
        there = other < num_rows
        begin = tl.load(crow + other, mask=there, other=0)
        longer = (tl.load(crow + other + 1, mask=there, other=0) - begin)[None, :] - length[:, None]
        later = other[None, :] > row[:, None]
        before = there[None, :] & ((longer > 0) | ((longer == 0) & later))
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(queue_ptr + 1 + pattern * num_rows + place, row, mask=exists)
    if tl.program_id(0) + pattern == 0:
        tl.store(queue_ptr, 0)

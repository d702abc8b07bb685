"""Tiles of rows that may end early and of head vectors that may be padded."""

import triton
import triton.language as tl


@triton.jit
def load_tile(pointers, rows, dims, CHECKED: tl.constexpr, PADDED: tl.constexpr):
    """The tile at ``pointers``, 0 outside of ``rows`` and ``dims``, one mask along each axis.

    All rows exist unless ``CHECKED``, and all elements of a head unless ``PADDED``.
    """
    if CHECKED:
        tile = tl.load(pointers, mask=rows & dims, other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=dims, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile

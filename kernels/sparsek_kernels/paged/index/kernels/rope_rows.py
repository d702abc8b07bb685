"""Queries and keys as learned rankings score them: where asked for, without their positions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    base, rows, position, live,
    rotation_ptr,
    rotation_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TURN_BACK: tl.constexpr,
):  # fmt: skip
    """Rows ``[ROWS, BLOCK_D]`` float32 at ``base + rows``, whole; as :func:`load_channels`."""
    return load_channels(
        base, rows, tl.arange(0, BLOCK_D), position, live, rotation_ptr, rotation_rows, HEAD_DIM,
        TURN_BACK,
    )  # fmt: skip


@triton.jit
def load_channels(
    base, rows, channel, position, live,
    rotation_ptr,
    rotation_rows,
    HEAD_DIM: tl.constexpr, TURN_BACK: tl.constexpr,
):  # fmt: skip
    """Channels ``[COLUMNS]`` of rows, ``[ROWS, COLUMNS]`` float32; 0 where not ``live`` ``[ROWS]``.

    With ``TURN_BACK`` the rotation by a row's ``position`` ``[ROWS]`` is undone, and what it made
    longer is as long as before.  ``rotation_ptr``: ``[rotation_rows, HEAD_DIM]`` float32, cosines
    then sines, of channels ``d`` and ``d + HEAD_DIM / 2``; positions past it take its last row.
    """
    mask = live[:, None] & (channel < HEAD_DIM)[None, :]
    x = tl.load(base + rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if TURN_BACK:
        HALF: tl.constexpr = HEAD_DIM // 2
        first = channel < HALF
        partner = tl.where(first, channel + HALF, channel - HALF)
        angle = tl.where(first, channel, partner)
        y = tl.load(base + rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        row = tl.minimum(position, rotation_rows - 1).to(tl.int64)
        turn = rotation_ptr + row[:, None] * HEAD_DIM + angle[None, :]
        cos = tl.load(turn, mask=mask, other=1.0)
        sin = tl.load(turn + HALF, mask=mask, other=0.0)
        x = (x * cos + tl.where(first[None, :], y, -y) * sin) / (cos * cos + sin * sin)
    return x

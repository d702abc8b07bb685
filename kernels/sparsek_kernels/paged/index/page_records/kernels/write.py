"""Storing the records of the segments that new keys complete (record.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.record import (
    SEGMENT,
    VECTORS,
    base_at,
    e5m2_code,
    mean_at,
    pairs_at,
    scale_code,
    scales_at,
    size_code,
    size_of,
    variance_at,
)


@triton.jit
def pair_squares(x):
    """Mean squares ``[2, WIDTH]`` of RoPE pairs, of rows and quarters ``[ROWS, 4, WIDTH]``."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[2]
    # Rows first: two lanes with a channel each, the product fused into the sum, would differ.
    squares = tl.sum(x * x, axis=0) * (0.5 / ROWS)
    return tl.sum(tl.reshape(squares, [2, 2, WIDTH]), axis=0)  # of both channels


@triton.jit
def both(x):
    """What pairs ``[2, WIDTH]`` have for all of their channels, ``[4, WIDTH]``."""
    WIDTH: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], [2, 2, WIDTH]), [4, WIDTH])


@triton.jit
def inverse_of(x):
    """``1 / x`` of non-negative numbers, 0 of 0."""
    return tl.where(x > 0.0, 1.0 / tl.where(x > 0.0, x, 1.0), 0.0)


@triton.jit
def write_keys(record, first, second, HEAD_DIM: tl.constexpr):
    """Write a record of its keys.

    first, second: ``[VECTORS, 4, BLOCK_Q]`` float32, the two keys of each vector, by quarters of
    their channels; 0 from ``HEAD_DIM / 4`` on.
    """
    BLOCK_Q: tl.constexpr = first.shape[2]
    QUARTER: tl.constexpr = HEAD_DIM // 4
    vector, quarter, offs = tl.arange(0, VECTORS), tl.arange(0, 4), tl.arange(0, BLOCK_Q)
    inside = offs < QUARTER
    channel = quarter[:, None] * QUARTER + offs[None, :]
    pair = tl.arange(0, 2)[:, None] * QUARTER + offs[None, :]

    x = (first + second) * 0.5
    mean = tl.sum(x, axis=0) * (1.0 / VECTORS)  # [4, BLOCK_Q]
    mean = tl.minimum(tl.maximum(mean, -65504.0), 65504.0).to(tl.float16)
    means = (record + mean_at(HEAD_DIM)).to(tl.pointer_type(tl.float16))
    tl.store(means + channel, mean, mask=inside[None, :])
    x = x - mean.to(tl.float32)[None, :, :]
    variance = e5m2_code(tl.minimum(pair_squares((first - second) * 0.5), 57344.0))
    tl.store(record + variance_at(HEAD_DIM) + pair, variance.to(tl.uint8), mask=inside[None, :])

    code = size_code(tl.sqrt(pair_squares(x)))  # [2, BLOCK_Q]
    base = tl.max(tl.max(code, axis=1), axis=0)
    below = tl.minimum(base - code, 15)
    packed = tl.sum(below << (4 * tl.arange(0, 2))[:, None], axis=0)
    tl.store(record + pairs_at(HEAD_DIM) + offs, packed.to(tl.uint8), mask=inside)
    # The byte after it is 0.
    tl.store((record + base_at(HEAD_DIM)).to(tl.pointer_type(tl.int16)), base.to(tl.int16))

    z = x * both(1.0 / size_of(base - below))[None, :, :]
    squares = tl.sum(tl.sum(z * z, axis=2), axis=1)
    large = z * z >= (squares * (1.0 / HEAD_DIM))[:, None, None]
    negative = tl.where(z < 0.0, 3, 0)
    level = negative ^ tl.where(large, 1, 0)  # half of it, rounded down
    packed = tl.sum(level << (6 - 2 * quarter)[None, :, None], axis=1)  # [VECTORS, BLOCK_Q]
    row = record + vector[:, None] * QUARTER + offs[None, :]
    tl.store(row, packed.to(tl.uint8), mask=inside[None, :])
    product = tl.sum(tl.sum(tl.abs(z) * tl.where(large, 3.0, 1.0), axis=2), axis=1)
    scale = squares * inverse_of(product)
    tl.store(record + scales_at(HEAD_DIM) + vector, scale_code(scale).to(tl.uint8))


@triton.jit
def write_record(
    record, keys, row,
    stride_kt,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Write one record of the 64 rows from ``row`` on of a page and KV head."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    offs = tl.arange(0, BLOCK_Q)
    channel = (tl.arange(0, 4)[:, None] * QUARTER + offs[None, :])[None, :, :]
    mask = (offs < QUARTER)[None, None, :]
    even = (row + 2 * tl.arange(0, VECTORS))[:, None, None].to(tl.int64)
    first = tl.load(keys + channel + even * stride_kt, mask=mask, other=0.0)
    second = tl.load(keys + channel + (even + 1) * stride_kt, mask=mask, other=0.0)
    write_keys(record, first.to(tl.float32), second.to(tl.float32), HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens"])
def write_records_kernel(
    record_ptr, k_ptr, slot_ptr,
    num_tokens,
    stride_rp, stride_rh, stride_rs,
    stride_kp, stride_kh, stride_kt,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: the records that ``TOKENS`` neighbouring tokens complete, for one KV head.

    A token completes the segment of which its slot is the last one.  -1 is no slot.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=-1)
    ends = (slots >= 0) & (slots % SEGMENT == SEGMENT - 1)
    head = tl.program_id(1).to(tl.int64)
    rank = tl.cumsum(ends.to(tl.int32), axis=0)
    for number in range(1, tl.sum(ends.to(tl.int32), axis=0) + 1):
        slot = tl.sum(tl.where(ends & (rank == number), slots, 0), axis=0)
        page = slot // PAGE_SIZE
        row = slot % PAGE_SIZE // SEGMENT * SEGMENT
        write_record(
            record_ptr + page * stride_rp + head * stride_rh + row // SEGMENT * stride_rs,
            k_ptr + page * stride_kp + head * stride_kh,
            row,
            stride_kt,
            HEAD_DIM,
            BLOCK_Q,
        )

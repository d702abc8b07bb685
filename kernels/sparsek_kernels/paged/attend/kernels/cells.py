"""Attention of decoded tokens over cells of few keys, and over what stands in for the others."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.attend.kernels.pieces import attend_pieces
from sparsek_kernels.paged.kernels.record import SEGMENT, load_value_means


@triton.jit
def attend_forced(
    acc,
    row_max,
    row_sum,
    q,
    position,
    k_ptr,
    v_ptr,
    table_ptr,
    piece_begin,
    piece_end,
    num_front,
    num_forced,
    first_local,
    low,
    high,
    qk_scale,
    stride_kp,
    stride_kt,
    stride_vp,
    stride_vt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SHARDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Running softmax over sinks and window of tokens at ``low`` to ``high``, or over all they see.

    Piece ``p`` of the ``num_forced`` is the run of ``BLOCK_N`` keys ``p``, from ``num_front`` on
    ``first_local + p - num_front``.  Only the last ones, the tokens' own, have keys that some of
    them must not see.
    """
    own = high // BLOCK_N - low // BLOCK_N + 1
    whole = tl.minimum(tl.maximum(num_forced - own, piece_begin), piece_end)
    acc, row_max, row_sum = attend_pieces(
        acc, row_max, row_sum, q, position, position >= 0, k_ptr, v_ptr, table_ptr, table_ptr,
        piece_begin, whole, num_front, num_forced, 0, first_local, high, 0, 0, qk_scale,
        stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_N, PAGE_SIZE, False, False, False, SHARDED, NUM_STAGES,
    )  # fmt: skip
    return attend_pieces(
        acc, row_max, row_sum, q, position, position >= 0, k_ptr, v_ptr, table_ptr, table_ptr,
        whole, piece_end, num_front, num_forced, 0, first_local, high, 0, 0, qk_scale,
        stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_N, PAGE_SIZE, False, True, False, SHARDED, NUM_STAGES,
    )  # fmt: skip


@triton.jit
def cell_keys(
    piece, selected_ptr, some, SEL_BLOCK: tl.constexpr, SELECTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions of the ``BLOCK_N`` keys of piece ``piece`` of the selected cells."""
    key = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    cell = tl.load(selected_ptr + key // SEL_BLOCK, mask=some & (key < SELECTED), other=0)
    return tl.maximum(cell, 0) * SEL_BLOCK + key % SEL_BLOCK


@triton.jit
def tail_page(table_ptr, segments, some, last_segment, RECORDS: tl.constexpr):
    """Pages that hold the records of ``segments``, before ``last_segment``."""
    return tl.load(table_ptr + segments // RECORDS, mask=some & (segments < last_segment), other=0)


@triton.jit
def attend_cells(
    acc,
    row_max,
    row_sum,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    selected_ptr,
    piece_begin,
    piece_end,
    qk_scale,
    stride_kp,
    stride_kt,
    stride_vp,
    stride_vt,
    tail_rows,
    mask_m,
    records_ptr,
    tail_begin,
    tail_end,
    first_segment,
    last_segment,
    stride_rp,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    SELECTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RECORD: tl.constexpr,
    SHARDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Running softmax over chosen cells, and over what stands in for the others of their segments.

    An iteration takes a piece of each: ``BLOCK_N`` of the ``SELECTED`` keys, and one more key for
    each of ``BLOCK_P`` segments, so that the latency of either hides behind the other.  Piece ``p``
    of the tail is the segments from ``first_segment + p * BLOCK_P`` on, before ``last_segment``;
    ``tail_rows`` ``[BLOCK_M]`` points at the logits of each row.  ``RECORD`` 0: there is no tail.

    All cells are before the window, so that positions are not compared.  Cells and pages are
    looked up one iteration ahead, so that no load of K and V waits for another load.
    """
    HAS_TAIL: tl.constexpr = RECORD > 0
    RECORDS: tl.constexpr = PAGE_SIZE // SEGMENT
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    last = piece_end - 1
    some = piece_begin < piece_end
    keys = cell_keys(piece_begin, selected_ptr, some, SEL_BLOCK, SELECTED, BLOCK_N)
    page = tl.load(table_ptr + keys // PAGE_SIZE, mask=some, other=0)
    count = piece_end - piece_begin
    if HAS_TAIL:
        count = tl.maximum(count, tail_end - tail_begin)
        end_segment = tl.minimum(first_segment + tail_end * BLOCK_P, last_segment)
        segments = first_segment + tail_begin * BLOCK_P + tl.arange(0, BLOCK_P)
        of_tail = tail_page(table_ptr, segments, count > 0, end_segment, RECORDS)
    for piece in tl.range(piece_begin, piece_begin + count, num_stages=NUM_STAGES):
        next_piece = tl.maximum(tl.minimum(piece + 1, last), 0)
        next_keys = cell_keys(next_piece, selected_ptr, some, SEL_BLOCK, SELECTED, BLOCK_N)
        next_page = tl.load(table_ptr + next_keys // PAGE_SIZE, mask=some, other=0)
        far, rows = page.to(tl.int64), keys % PAGE_SIZE  # [BLOCK_N]
        here = (piece < piece_end) & (piece * BLOCK_N + tl.arange(0, BLOCK_N) < SELECTED)
        if SHARDED:
            here = here & (page >= 0)
        mask = here[:, None] & mask_d[None, :]
        k_rows = k_ptr + (far * stride_kp + rows * stride_kt)[:, None] + offs_d[None, :]
        v_rows = v_ptr + (far * stride_vp + rows * stride_vt)[:, None] + offs_d[None, :]
        k = tl.load(k_rows, mask=mask, other=0.0)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_rows, mask=mask, other=0.0)
        if HAS_TAIL:
            next_segments = segments + BLOCK_P
            next_of_tail = tail_page(table_ptr, next_segments, True, end_segment, RECORDS)
            left = segments < end_segment
            if SHARDED:
                left = left & (of_tail >= 0)
            tail = tl.load(
                tail_rows[:, None] + segments[None, :],
                mask=mask_m[:, None] & left[None, :],
                other=float("-inf"),
            )  # [BLOCK_M, BLOCK_P]
            records = records_ptr + of_tail.to(tl.int64) * stride_rp + segments % RECORDS * RECORD
            level, scale = load_value_means(records, left, HEAD_DIM, BLOCK_D)  # [BLOCK_P, BLOCK_D]
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        logits = tl.where(here[None, :], logits, float("-inf"))
        top = row_max
        if HAS_TAIL:
            top = tl.maximum(top, tl.max(tail, axis=1))
        top = tl.maximum(top, tl.max(logits, axis=1) * qk_scale)
        shrink = tl.exp2(row_max - top)
        weights = tl.exp2(logits * qk_scale - top[:, None])
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        row_max = top
        if HAS_TAIL:
            weights = tl.exp2(tail - top[:, None])
            row_sum += tl.sum(weights, axis=1)
            if q.dtype == tl.bfloat16:  # 128 + level by its bits; its weight has the scale
                means = (level | 0x4300).to(tl.bfloat16, bitcast=True)
                weights = (weights * scale[None, :]).to(q.dtype)
                acc -= (tl.sum(weights.to(tl.float32), axis=1) * 135.5)[:, None]
                acc = tl.dot(weights, means, acc)
            else:
                means = ((level.to(tl.float32) - 7.5) * scale[:, None]).to(q.dtype)
                acc = tl.dot(weights.to(q.dtype), means, acc, input_precision="ieee")
            segments, of_tail = next_segments, next_of_tail
        keys, page = next_keys, next_page
    return acc, row_max, row_sum

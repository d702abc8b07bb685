"""Attention of decoded tokens over cells of few keys, and over what stands in for the others."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.attend.kernels.pieces import add_weights, attend_pieces
from sparsek_kernels.paged.kernels.record import SEGMENT


@triton.jit
def attend_forced(
    acc, row_max, row_sum, q, position,
    k_ptr, v_ptr, table_ptr,
    piece_begin, piece_end, num_front, num_forced, first_local, low, high, qk_scale,
    stride_kp, stride_kt,
    stride_vp, stride_vt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SHARDED: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
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
def attend_cells(
    acc, row_max, row_sum, q,
    k_ptr, v_ptr, table_ptr, selected_ptr,
    piece_begin, piece_end, qk_scale,
    stride_kp, stride_kt,
    stride_vp, stride_vt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Running softmax over pieces of ``BLOCK_N`` of the ``SELECTED`` keys in chosen cells.

    All of them are before the window, so that positions are not compared.  Cells and their pages
    are looked up one iteration ahead, so that no load of K and V waits for another load.
    """
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    PARTIAL: tl.constexpr = SELECTED % BLOCK_N != 0
    last = piece_end - 1
    some = piece_begin < piece_end
    keys = cell_keys(piece_begin, selected_ptr, some, SEL_BLOCK, SELECTED, BLOCK_N)
    page = tl.load(table_ptr + keys // PAGE_SIZE, mask=some, other=0)
    for piece in tl.range(piece_begin, piece_end, num_stages=NUM_STAGES):
        next_piece = tl.minimum(piece + 1, last)
        next_keys = cell_keys(next_piece, selected_ptr, True, SEL_BLOCK, SELECTED, BLOCK_N)
        next_page = tl.load(table_ptr + next_keys // PAGE_SIZE)
        far, rows = page.to(tl.int64), keys % PAGE_SIZE  # [BLOCK_N]
        k_rows = k_ptr + (far * stride_kp + rows * stride_kt)[:, None] + offs_d[None, :]
        v_rows = v_ptr + (far * stride_vp + rows * stride_vt)[:, None] + offs_d[None, :]
        if PARTIAL or SHARDED or HEAD_DIM != BLOCK_D:
            here = piece * BLOCK_N + tl.arange(0, BLOCK_N) < SELECTED  # [BLOCK_N]
            if SHARDED:
                here = here & (page >= 0)
            mask = here[:, None] & mask_d[None, :]
            k = tl.load(k_rows, mask=mask, other=0.0)
            v = tl.load(v_rows, mask=mask, other=0.0)
        else:
            k = tl.load(k_rows)  # [BLOCK_N, BLOCK_D]
            v = tl.load(v_rows)  # [BLOCK_N, BLOCK_D]
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if PARTIAL or SHARDED:
            logits = tl.where(here[None, :], logits, float("-inf"))
        acc, row_max, row_sum, weights = add_weights(acc, row_max, row_sum, logits, qk_scale)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        keys, page = next_keys, next_page
    return acc, row_max, row_sum


@triton.jit
def attend_tail(
    acc, row_max, row_sum, tail_rows, mask_m,
    records_ptr, table_ptr,
    piece_begin, piece_end, first_segment, last_segment,
    stride_rp,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, SHARDED: tl.constexpr,
):  # fmt: skip
    """Running softmax over what stands in for cells that are not chosen: one more key a segment.

    Piece ``p`` is the ``BLOCK_P`` segments from ``first_segment + p * BLOCK_P`` on, before
    ``last_segment``.  ``tail_rows`` ``[BLOCK_M]`` points at the logits of each row.
    """
    RECORDS: tl.constexpr = PAGE_SIZE // SEGMENT
    offs_p = tl.arange(0, BLOCK_P)
    segments = first_segment + piece_begin * BLOCK_P + offs_p
    some = (piece_begin < piece_end) & (segments < last_segment)
    page = tl.load(table_ptr + segments // RECORDS, mask=some, other=0)
    for _ in tl.range(piece_begin, piece_end, num_stages=2):
        next_segments = segments + BLOCK_P
        next_page = tl.load(
            table_ptr + next_segments // RECORDS, mask=next_segments < last_segment, other=0
        )
        here = segments < last_segment
        if SHARDED:
            here = here & (page >= 0)
        logits = tl.load(
            tail_rows[:, None] + segments[None, :],
            mask=mask_m[:, None] & here[None, :],
            other=float("-inf"),
        )  # [BLOCK_M, BLOCK_P]
        records = records_ptr + page.to(tl.int64) * stride_rp + segments % RECORDS * RECORD
        level, scale = load_value_means(records, here, HEAD_DIM, BLOCK_D)  # [BLOCK_P, BLOCK_D]
        acc, row_max, row_sum, weights = add_weights(acc, row_max, row_sum, logits, 1.0)
        if DTYPE == tl.bfloat16:  # noqa: SIM300 (128 + level by its bits; its weight has the scale)
            v = (level | 0x4300).to(tl.bfloat16, bitcast=True)
            weights = (weights * scale[None, :]).to(DTYPE)
            acc -= (tl.sum(weights.to(tl.float32), axis=1) * 135.5)[:, None]
            acc = tl.dot(weights, v, acc)
        else:
            v = ((level.to(tl.float32) - 7.5) * scale[:, None]).to(DTYPE)
            acc = tl.dot(weights.to(DTYPE), v, acc, input_precision="ieee")
        segments, page = next_segments, next_page
    return acc, row_max, row_sum

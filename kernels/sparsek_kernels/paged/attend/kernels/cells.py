"""Attention of decoded tokens over a sample of cells of few keys, which have weights."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.attend.kernels.pieces import add_weights, attend_pieces
from sparsek_kernels.paged.sample import CELL_BITS as _CELL_BITS
from sparsek_kernels.paged.sample import STEPS as _STEPS

CELL_BITS = tl.constexpr(_CELL_BITS)
CELL_MASK = tl.constexpr((1 << _CELL_BITS) - 1)
STEPS = tl.constexpr(_STEPS)


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
    """Positions of the ``BLOCK_N`` keys of piece ``piece`` of a sample, and logs of their weights.

    Places that are not filled have the request's first keys, with weights of 0.
    """
    key = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    entry = tl.load(selected_ptr + key // SEL_BLOCK, mask=some & (key < SELECTED), other=-1)
    cell = tl.maximum(entry, 0) & CELL_MASK
    steps = (entry >> CELL_BITS).to(tl.float32)
    bonus = tl.where(entry >= 0, steps * (1.0 / STEPS), float("-inf"))
    return cell * SEL_BLOCK + key % SEL_BLOCK, bonus


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
    last = piece_end - 1
    some = piece_begin < piece_end
    keys, bonus = cell_keys(piece_begin, selected_ptr, some, SEL_BLOCK, SELECTED, BLOCK_N)
    page = tl.load(table_ptr + keys // PAGE_SIZE, mask=some, other=0)
    for piece in tl.range(piece_begin, piece_end, num_stages=NUM_STAGES):
        next_keys, next_bonus = cell_keys(
            tl.minimum(piece + 1, last), selected_ptr, True, SEL_BLOCK, SELECTED, BLOCK_N
        )
        next_page = tl.load(table_ptr + next_keys // PAGE_SIZE)
        far, rows = page.to(tl.int64), keys % PAGE_SIZE  # [BLOCK_N]
        k_rows = k_ptr + (far * stride_kp + rows * stride_kt)[:, None] + offs_d[None, :]
        v_rows = v_ptr + (far * stride_vp + rows * stride_vt)[:, None] + offs_d[None, :]
        if SHARDED or HEAD_DIM != BLOCK_D:
            mask = mask_d[None, :]
            if SHARDED:
                mask = mask & (page >= 0)[:, None]
                bonus = tl.where(page >= 0, bonus, float("-inf"))
            k = tl.load(k_rows, mask=mask, other=0.0)
            v = tl.load(v_rows, mask=mask, other=0.0)
        else:
            k = tl.load(k_rows)  # [BLOCK_N, BLOCK_D]
            v = tl.load(v_rows)  # [BLOCK_N, BLOCK_D]
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        logits = logits * qk_scale + bonus[None, :]
        acc, row_max, row_sum, weights = add_weights(acc, row_max, row_sum, logits, 1.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        keys, bonus, page = next_keys, next_bonus, next_page
    return acc, row_max, row_sum

"""Attention of decoded tokens over sinks and window, then over a sample of cells with weights."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.attend.kernels.pieces import add_weights
from sparsek_kernels.paged.kernels.sample import entry_of


@triton.jit
def piece_keys(
    piece, sampled, some, selected_ptr, num_front, first_local, high,
    SEL_BLOCK: tl.constexpr, SELECTED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions of the ``BLOCK_N`` keys of piece ``piece``, and logs of their weights.

    Of a sample, places that are not filled have the request's first keys, with weights of 0.  Other
    pieces are runs of keys: ``piece``, from ``num_front`` on ``first_local + piece - num_front``.
    Behind the last token, at ``high``, are no keys: it is there again, with a weight of 0.
    """
    offs = tl.arange(0, BLOCK_N)
    place = piece * BLOCK_N + offs
    here = sampled & some & (place < SELECTED)
    entry = tl.load(selected_ptr + place // SEL_BLOCK, mask=here, other=-1)
    cell, bonus = entry_of(entry)
    run = tl.where(piece < num_front, piece, first_local + piece - num_front)
    keys = tl.where(sampled, cell * SEL_BLOCK + place % SEL_BLOCK, run * BLOCK_N + offs)
    bonus = tl.where(sampled, bonus, tl.where(keys <= high, 0.0, float("-inf")))
    return tl.minimum(keys, high), bonus


@triton.jit
def rows_of(page, keys, strides, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Where rows of a cache begin, in ``UNIT`` elements; of ``UNIT`` 1 in 64 bits."""
    per_page, _per_head, per_token = strides
    if UNIT == 1:
        page = page.to(tl.int64)
    return page * (per_page // UNIT) + keys % PAGE_SIZE * (per_token // UNIT)


@triton.jit
def attend_sample(
    acc, row_max, row_sum, q, position, k_ptr, v_ptr, table_ptr, selected_ptr,
    forced, cells, num_front, first_local, high, qk_scale, k_strides, v_strides,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARDED: tl.constexpr, JOINED: tl.constexpr,
    UNIT: tl.constexpr, QUERIES: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Running softmax over runs of keys, then over a sample, which is waited for with ``OVERLAP``.

    One loop does both: a server's other kernels push its code out of the caches, and the second
    time it is there.  Keys and their pages are looked up one iteration ahead, so that no load of K
    and V waits for another load.

    forced, cells: first piece and end, of the runs and of the sample.
    """
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    for half in range(2):
        sampled = half > 0
        if OVERLAP and sampled:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        begin = tl.where(sampled, cells[0], forced[0])
        end = tl.where(sampled, cells[1], forced[1])
        keys, bonus = piece_keys(
            begin, sampled, begin < end, selected_ptr, num_front, first_local, high,
            SEL_BLOCK, SELECTED, BLOCK_N,
        )  # fmt: skip
        page = tl.load(table_ptr + keys // PAGE_SIZE, mask=begin < end, other=0).to(tl.int32)
        k_rows = rows_of(page, keys, k_strides, PAGE_SIZE, UNIT)
        v_rows = rows_of(page, keys, v_strides, PAGE_SIZE, UNIT)
        for piece in tl.range(begin, end, num_stages=NUM_STAGES):
            next_keys, next_bonus = piece_keys(
                tl.minimum(piece + 1, end - 1), sampled, True, selected_ptr, num_front, first_local,
                high, SEL_BLOCK, SELECTED, BLOCK_N,
            )  # fmt: skip
            next_page = tl.load(table_ptr + next_keys // PAGE_SIZE).to(tl.int32)
            at_k = k_ptr + k_rows.to(tl.int64)[:, None] * UNIT + offs_d[None, :]
            at_v = v_ptr + v_rows.to(tl.int64)[:, None] * UNIT + offs_d[None, :]
            if SHARDED or HEAD_DIM != BLOCK_D:
                mask = mask_d[None, :]
                if SHARDED:
                    mask = mask & (page >= 0)[:, None]
                    bonus = tl.where(page >= 0, bonus, float("-inf"))
                k = tl.load(at_k, mask=mask, other=0.0)
                v = tl.load(at_v, mask=mask, other=0.0)
            else:
                k = tl.load(at_k)  # [BLOCK_N, BLOCK_D]
                v = tl.load(at_v)  # [BLOCK_N, BLOCK_D]
            logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            logits = logits * qk_scale + bonus[None, :]  # [BLOCK_M, BLOCK_N]
            if QUERIES > 1:
                logits = tl.where(keys[None, :] <= position[:, None], logits, float("-inf"))
            acc, row_max, row_sum, weights = add_weights(acc, row_max, row_sum, logits, 1.0)
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
            keys, bonus, page = next_keys, next_bonus, next_page
            k_rows = rows_of(page, keys, k_strides, PAGE_SIZE, UNIT)
            v_rows = k_rows if JOINED else rows_of(page, keys, v_strides, PAGE_SIZE, UNIT)
    return acc, row_max, row_sum

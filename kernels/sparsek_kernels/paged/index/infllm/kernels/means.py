"""Storing the means of the cells that new keys complete (means.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.kernels.rope_rows import load_rows


@triton.jit
def write_means_kernel(
    means_ptr, k_ptr, rotation_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    rotation_rows,
    stride_mp, stride_mh,
    stride_kp, stride_kh, stride_kt,
    stride_br,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, CELL: tl.constexpr,
    TURN_BACK: tl.constexpr,
):  # fmt: skip
    """One program: the mean of one cell, for one KV head of one request.

    Grid ``(cells, Hkv, requests)``.  Cells count from that of the request's first new token; those
    that its tokens do not fill are left alone.
    """
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_token = tl.load(cu_seqlens_ptr + request).to(tl.int32)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1).to(tl.int32) - first_token
    cell = (seq_len - num_tokens) // CELL + tl.program_id(0)
    if (num_tokens <= 0) | (seq_len <= 0) | ((cell + 1) * CELL > seq_len):
        return
    row = (cell * CELL) % PAGE_SIZE
    entry = block_table_ptr + request.to(tl.int64) * stride_br + (cell * CELL) // PAGE_SIZE
    page = tl.load(entry).to(tl.int64)
    token = tl.arange(0, CELL)
    keys = load_rows(
        k_ptr + page * stride_kp + head * stride_kh, (row + token).to(tl.int64) * stride_kt,
        cell * CELL + token, token < CELL, rotation_ptr, rotation_rows,
        HEAD_DIM, BLOCK_D, TURN_BACK,
    )  # [CELL, BLOCK_D]  # fmt: skip
    offs_d = tl.arange(0, BLOCK_D)
    out = means_ptr + page * stride_mp + head * stride_mh + (row // CELL) * HEAD_DIM
    mean = tl.sum(keys, axis=0) * (1.0 / CELL)
    tl.store(out + offs_d, mean.to(means_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)

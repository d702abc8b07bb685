"""Gate queries and gate keys of SeerAttention-R (arXiv 2506.08889, section 3)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.kernels.rope_rows import load_channels
from sparsek_kernels.paged.kernels.tiles import TOP_K, tile_sees_all, tile_span


@triton.jit
def add_product(total, x, channel, weight_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """``total + x @ weight[channel]``.  total: ``[BLOCK_D]``; x, channel: ``[COLUMNS]``."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = (channel < HEAD_DIM)[:, None] & (offs_d < HEAD_DIM)[None, :]
    weight = tl.load(
        weight_ptr + channel[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0
    )  # [COLUMNS, BLOCK_D]
    return total + tl.sum(x[:, None] * weight, axis=0)


@triton.jit
def store_turned(
    out_ptr,
    x,
    norm_ptr,
    position,
    rotation_ptr,
    rotation_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, NORM_EPS: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Write a gate query or key ``x`` ``[BLOCK_D]``: normalised, then turned by its position.

    ``rotation_ptr`` is that of :func:`load_channels`.
    """
    offs_d = tl.arange(0, BLOCK_D)
    mask = offs_d < HEAD_DIM
    if NORM:
        weight = tl.load(norm_ptr + offs_d, mask=mask, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / HEAD_DIM + NORM_EPS) * weight
    if TURN:
        HALF: tl.constexpr = HEAD_DIM // 2
        first = offs_d < HALF
        partner = tl.where(first, offs_d + HALF, offs_d - HALF)
        turn = rotation_ptr + tl.minimum(position, rotation_rows - 1).to(tl.int64) * HEAD_DIM
        turn += tl.where(first, offs_d, partner)
        cos = tl.load(turn, mask=mask, other=1.0)
        sin = tl.load(turn + HALF, mask=mask, other=0.0)
        y = tl.gather(x, tl.where(mask, partner, offs_d), axis=0)
        x = x * cos + tl.where(first, -y, y) * sin
    tl.store(out_ptr + offs_d, x, mask=mask)


@triton.jit
def write_gate_keys_kernel(
    gate_key_ptr, k_ptr, weight_ptr, norm_ptr, rotation_ptr, block_table_ptr, seq_lens_ptr,
    cu_seqlens_ptr,
    rotation_rows,
    stride_gp, stride_gh,
    stride_kp, stride_kh, stride_kt,
    stride_br,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr, NORM: tl.constexpr, NORM_EPS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One program: the gate key of one block, for one KV head of one request.

    Grid ``(blocks, Hkv, requests)``.  Blocks count from that of the request's first new token;
    those that its tokens do not complete are left alone.  ``weight_ptr``: ``[Hkv, 3 D, D]``.
    """
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_token = tl.load(cu_seqlens_ptr + request).to(tl.int32)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1).to(tl.int32) - first_token
    block = (seq_len - num_tokens) // SEL_BLOCK + tl.program_id(0)
    if (num_tokens <= 0) | (seq_len <= 0) | ((block + 1) * SEL_BLOCK > seq_len):
        return
    row = (block * SEL_BLOCK) % PAGE_SIZE
    entry = block_table_ptr + request.to(tl.int64) * stride_br + (block * SEL_BLOCK) // PAGE_SIZE
    page = tl.load(entry).to(tl.int64)
    token = tl.arange(0, triton.next_power_of_2(SEL_BLOCK))
    live = token < SEL_BLOCK
    keys = k_ptr + page * stride_kp + head * stride_kh
    rows = (row + token).to(tl.int64) * stride_kt
    weight = weight_ptr + head * (3 * HEAD_DIM * HEAD_DIM)
    total = tl.zeros([BLOCK_D], tl.float32)
    for begin in tl.range(0, HEAD_DIM, COLUMNS):
        channel = begin + tl.arange(0, COLUMNS)
        x = load_channels(
            keys, rows, channel, block * SEL_BLOCK + token, live, rotation_ptr, rotation_rows,
            HEAD_DIM, TURN,
        )  # fmt: skip
        largest = tl.max(tl.where(live[:, None], x, float("-inf")), axis=0)  # [COLUMNS]
        smallest = tl.min(tl.where(live[:, None], x, float("inf")), axis=0)
        mean = tl.sum(x, axis=0) * (1.0 / SEL_BLOCK)
        total = add_product(total, largest, channel, weight, HEAD_DIM, BLOCK_D)
        part = weight + HEAD_DIM * HEAD_DIM
        total = add_product(total, smallest, channel, part, HEAD_DIM, BLOCK_D)
        part += HEAD_DIM * HEAD_DIM
        total = add_product(total, mean, channel, part, HEAD_DIM, BLOCK_D)
    out = gate_key_ptr + page * stride_gp + head * stride_gh + (row // SEL_BLOCK) * HEAD_DIM
    store_turned(
        out, total, norm_ptr, block * SEL_BLOCK, rotation_ptr, rotation_rows, HEAD_DIM, BLOCK_D,
        NORM, NORM_EPS, TURN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["dense_below", "first_token"])
def gate_queries_kernel(
    gate_query_ptr, q_ptr, weight_ptr, norm_ptr, rotation_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_token, rotation_rows,
    stride_qt, stride_qh,
    TOKENS_PER_REQUEST: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One program: the gate query of one token and KV head; none where the token sees everything.

    Grid ``(tokens, Hkv)``.  Writes ``[tokens, Hkv, D]`` float32.  ``weight_ptr``:
    ``[Hkv, GROUP, D, D]``.
    """
    local = tl.program_id(0)
    kv_head = tl.program_id(1)
    _request, position, low, high, token_of_zero = tile_span(
        first_token + local, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TOKENS_PER_REQUEST,
        1,
    )  # fmt: skip
    full = tile_sees_all(
        position, dense_below, TOP_K, 1, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if (high < low) | full:
        return
    query = q_ptr + (token_of_zero + position).to(tl.int64) * stride_qt
    weight = weight_ptr + kv_head.to(tl.int64) * (GROUP * HEAD_DIM * HEAD_DIM)
    here = tl.zeros([1], tl.int32)
    total = tl.zeros([BLOCK_D], tl.float32)
    for member in tl.range(0, GROUP):
        rows = here.to(tl.int64) + (kv_head * GROUP + member).to(tl.int64) * stride_qh
        for begin in tl.range(0, HEAD_DIM, COLUMNS):
            channel = begin + tl.arange(0, COLUMNS)
            x = load_channels(
                query, rows, channel, position + here, here == 0, rotation_ptr, rotation_rows,
                HEAD_DIM, TURN,
            )  # fmt: skip
            mine = weight + member * (HEAD_DIM * HEAD_DIM)
            total = add_product(total, tl.sum(x, axis=0), channel, mine, HEAD_DIM, BLOCK_D)
    out = gate_query_ptr + (local.to(tl.int64) * tl.num_programs(1) + kv_head) * HEAD_DIM
    store_turned(
        out, total, norm_ptr, position, rotation_ptr, rotation_rows, HEAD_DIM, BLOCK_D, NORM,
        NORM_EPS, TURN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["dense_below", "first_token"])
def gate_logits_kernel(
    logit_ptr, gate_query_ptr, gate_key_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    scale, dense_below, first_token,
    stride_lt, stride_lh,
    stride_gp, stride_gh,
    stride_br,
    TOKENS_PER_REQUEST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    SINK_BLOCKS: tl.constexpr, REACH_BLOCKS: tl.constexpr, SCORED_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Logits of the blocks before a token's own, for one token and KV head, in base 2.

    Grid ``(shares, Hkv, tokens)``.  A program takes every ``num_programs(0)``-th run of ``BLOCK_N``
    blocks, so that the grid need not grow with the longest context allowed.  Writes
    ``[tokens, Hkv, stride_lh]`` float32, nothing past a row's end.
    """
    kv_head = tl.program_id(1)
    local = tl.program_id(2)
    request, position, low, high, _token_of_zero = tile_span(
        first_token + local, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TOKENS_PER_REQUEST,
        1,
    )  # fmt: skip
    num_blocks = tl.minimum(position // SEL_BLOCK, stride_lh)
    full = tile_sees_all(
        position, dense_below, TOP_K, 1, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if (high < low) | full:
        return
    offs_d = tl.arange(0, BLOCK_D)
    channels = offs_d < HEAD_DIM
    row = local.to(tl.int64) * tl.num_programs(1) + kv_head
    query = tl.load(gate_query_ptr + row * HEAD_DIM + offs_d, mask=channels, other=0.0) * scale
    keys = gate_key_ptr + kv_head.to(tl.int64) * stride_gh
    table = block_table_ptr + request.to(tl.int64) * stride_br
    out = logit_ptr + local.to(tl.int64) * stride_lt + kv_head.to(tl.int64) * stride_lh
    for first in tl.range(tl.program_id(0) * BLOCK_N, num_blocks, tl.num_programs(0) * BLOCK_N):
        block = first + tl.arange(0, BLOCK_N)
        live = block < num_blocks
        token = block * SEL_BLOCK
        page = tl.load(table + token // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        rows = page * stride_gp + (token % PAGE_SIZE) // SEL_BLOCK * HEAD_DIM
        key = tl.load(
            keys + rows[:, None] + offs_d[None, :],
            mask=live[:, None] & channels[None, :],
            other=0.0,
        )  # [BLOCK_N, BLOCK_D]
        tl.store(out + block, tl.sum(key * query[None, :], axis=1), mask=live)

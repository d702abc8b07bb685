"""Triton kernels of the simulation: what no tensor of logits has room for on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_logits_kernel(
    out_ptr, q_ptr, x_ptr, base_ptr, rows_ptr, softmax_scale, M, BLOCKS,
    D: tl.constexpr, VECTORS: tl.constexpr, LARGEST: tl.constexpr, BASE: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Logs of sums of exps, or largest logits, of the vectors of each block: ``[H, M, BLOCKS]``.

    A program has ``BLOCK_M`` rows of a KV head and ``STEPS`` times 64 vectors.  Where ``CAUSAL``,
    the result is -inf before.
    """
    PER: tl.constexpr = 64 // VECTORS  # blocks of a step
    head = tl.program_id(2).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    mask_m = offs_m < M
    q_ptr += head * M * D
    x_ptr += head * BLOCKS * VECTORS * D
    out_ptr += head * M * BLOCKS
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d, mask=mask_m[:, None], other=0.0)
    if CAUSAL:
        rows = tl.load(rows_ptr + offs_m, mask=mask_m, other=0)
    first = tl.program_id(1) * STEPS * PER
    steps = STEPS
    if CAUSAL:  # what no row sees is -inf already
        steps = tl.minimum(STEPS, (tl.max(rows, 0).to(tl.int32) // VECTORS - first) // PER + 1)
    for step in range(steps):
        block = first + step * PER + tl.arange(0, PER)
        offs_n = (first + step * PER) * VECTORS + tl.arange(0, 64)
        mask_n = offs_n < BLOCKS * VECTORS
        x = tl.load(x_ptr + offs_n[:, None] * D + offs_d, mask=mask_n[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(x), input_precision="ieee") * softmax_scale  # [BLOCK_M, 64]
        if CAUSAL:
            logits = tl.where(offs_n[None, :] <= rows[:, None], logits, -float("inf"))
        logits = tl.reshape(logits, [BLOCK_M, PER, VECTORS])
        made = tl.max(logits, 2)  # [BLOCK_M, PER]
        if not LARGEST:
            high = tl.where(made == -float("inf"), 0.0, made)
            made = high + tl.log(tl.sum(tl.exp(logits - high[:, :, None]), 2))
        at = offs_m[:, None].to(tl.int64) * BLOCKS + block[None, :]
        mask = mask_m[:, None] & (block[None, :] < BLOCKS)
        if BASE:
            made += tl.load(base_ptr + head * M * BLOCKS + at, mask=mask, other=0.0)
        tl.store(out_ptr + at, made, mask=mask)


@triton.jit
def attend_blocks_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, lists_ptr, logs_ptr, counts_ptr, softmax_scale, start,
    KEYS, TILES, MOST,
    D: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's rows over its list of blocks of 64 keys (FlashAttention-2).

    A program has ``BLOCK_M`` of a tile's ``GROUP * TILE`` rows.  Its list begins with a block of
    which each row sees a key.  The logs of the blocks' weights are added to logits.
    """
    tile = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < GROUP * TILE
    row = tile * TILE + offs_m % TILE
    at_row = (head * GROUP + offs_m // TILE) * TILES * TILE + row
    offs_d = tl.arange(0, D)
    at = at_row[:, None] * D + offs_d
    q = tl.load(q_ptr + at, mask=mask_m[:, None], other=0.0)
    last = tl.minimum(start + row, KEYS - 1)
    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    k_ptr += head * KEYS * D
    v_ptr += head * KEYS * D
    lists_ptr += (head * TILES + tile) * MOST
    logs_ptr += (head * TILES + tile) * MOST
    for place in range(tl.load(counts_ptr + head * TILES + tile)):
        offs_n = tl.load(lists_ptr + place) * 64 + tl.arange(0, 64)
        there = (offs_n < KEYS)[:, None]
        k = tl.load(k_ptr + offs_n[:, None] * D + offs_d, mask=there, other=0.0)
        v = tl.load(v_ptr + offs_n[:, None] * D + offs_d, mask=there, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * softmax_scale  # [BLOCK_M, 64]
        logits += tl.load(logs_ptr + place)
        logits = tl.where(offs_n[None, :] <= last[:, None], logits, -float("inf"))
        high = tl.maximum(most, tl.max(logits, 1))
        weights = tl.exp(logits - high[:, None])
        shrink = tl.exp(most - high)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = high
    tl.store(out_ptr + at, acc / total[:, None], mask=mask_m[:, None])
    tl.store(lse_ptr + at_row, most + tl.log(total), mask=mask_m)

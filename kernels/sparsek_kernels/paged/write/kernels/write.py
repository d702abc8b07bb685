"""Storing new keys and values in a paged cache, with the sketch of the keys they touch."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.key_means.kernels.code import code_of, halves, rotate, scale_of

EDGE = tl.constexpr(7.49)
"""Values from here on are rounded to the outermost level, which has no next one."""


@triton.jit
def with_checksum(level, rest, code, HEAD_DIM: tl.constexpr):
    """Levels ``[BLOCK_H, BLOCK_D]`` int32 with checksums ``code``, at most eight of a row moved.

    The arithmetic is explained in sketch.py.  level: the nearest ones, 0 beyond ``HEAD_DIM``; rest:
    how far the values lie above them; code: ``[BLOCK_H]`` int32.
    """
    BLOCK_H: tl.constexpr = level.shape[0]
    RUNS: tl.constexpr = level.shape[1] // 4
    run = tl.arange(0, RUNS)[:, None]
    high = run >= HEAD_DIM // 8
    column = tl.arange(0, 4)
    weight = (1 << (column[None, :] + tl.where(high, 4, 0)))[None, :, :]  # [1, RUNS, 4]
    level = tl.reshape(level, [BLOCK_H, RUNS, 4])
    rest = tl.reshape(rest, [BLOCK_H, RUNS, 4])
    total = tl.sum(tl.sum(level * weight, axis=2), axis=1)
    # Of each weight the one that is nearest to halfway between two levels, the last of equals.
    nearness = tl.abs(rest).to(tl.int32, bitcast=True) & -128
    key = nearness | ((run % 64) << 1)[None, :, :] | (rest < 0.0).to(tl.int32)
    inside = (run < HEAD_DIM // 4)[None, :, :]
    low = tl.max(tl.where(high[None, :, :], -1, key), axis=1, keep_dims=True)  # [BLOCK_H, 1, 4]
    upper = tl.max(tl.where(high[None, :, :] & inside, key, -1), axis=1, keep_dims=True)
    down = ((low & 1) | ((upper & 1) << 4)) << column[None, None, :]
    downs = tl.sum(tl.sum(down, axis=2), axis=1)
    missing = code - total
    moved = (missing + downs) ^ downs
    moves = (key == tl.where(high[None, :, :], upper, low)) & inside
    moves = moves & ((moved[:, None, None] & weight) != 0)
    level += tl.where(moves, 1 - ((key & 1) << 1), 0)
    return tl.reshape(level, [BLOCK_H, RUNS * 4])


@triton.jit
def write_vector(
    base,
    mean,
    vector,
    live,
    HEAD_DIM: tl.constexpr,
    ROTATION: tl.constexpr,
):
    """Write one vector of the sketch of a page (format in sketch.py) for some KV heads.

    base: ``[BLOCK_H]`` where the heads' bytes begin; mean: ``[BLOCK_H, BLOCK_D]`` float32, zero
    beyond ``HEAD_DIM``; live: ``[BLOCK_H]``, heads that exist.
    """
    BLOCK_H: tl.constexpr = mean.shape[0]
    BLOCK_D: tl.constexpr = mean.shape[1]
    HALF: tl.constexpr = HEAD_DIM // 2
    x = rotate(mean, ROTATION)
    largest = tl.max(tl.abs(x), axis=1)
    code = code_of(largest / 8.0)
    step = tl.broadcast_to(scale_of(code)[:, None], [BLOCK_H, BLOCK_D])
    y = tl.minimum(tl.maximum(tl.div_rn(x, step), -EDGE), EDGE)
    level = tl.floor(y)
    rest = y - (level + 0.5)
    inside = tl.arange(0, BLOCK_D) < HEAD_DIM
    level = tl.where(inside[None, :], level.to(tl.int32) + 8, 0)
    low, high = halves(with_checksum(level, rest, code, HEAD_DIM), HEAD_DIM)
    offs = tl.arange(0, BLOCK_D // 2)
    rows = base[:, None] + vector * HALF + offs[None, :]
    tl.store(rows, (low | (high << 4)).to(tl.uint8), mask=live[:, None] & (offs < HALF)[None, :])


@triton.jit
def write_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    summary_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    k_inv_scale,
    v_inv_scale,
    num_tokens,
    stride_cp,
    stride_ch,
    stride_ct,
    stride_vp,
    stride_vh,
    stride_vt,
    stride_sp,
    stride_sh,
    stride_kt,
    stride_kh,
    stride_xt,
    stride_xh,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTATION: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_SUMMARY: tl.constexpr,
):
    """One program: one token, ``BLOCK_H`` KV heads.

    The token that comes last of its ``VECTOR`` in this batch also writes these tokens' vector.
    Keys of this batch are read from the inputs, since their own programs may not have stored them
    yet, and rounded as those store them; earlier keys come from the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if HAS_SUMMARY:
        # Here, and K and V stored last: no load waits for another one that it does not need.
        next_slot = tl.load(slot_ptr + token + 1, mask=token + 1 < num_tokens, other=-1)
    if slot < 0:
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_h < NUM_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
    head = offs_h.to(tl.int64)[:, None]
    page = slot // PAGE_SIZE
    row = slot % PAGE_SIZE
    k_page = k_cache_ptr + page * stride_cp + head * stride_ch + offs_d[None, :]
    v_page = v_cache_ptr + page * stride_vp + head * stride_vh + offs_d[None, :]
    k = tl.load(k_ptr + token * stride_kt + head * stride_kh + offs_d[None, :], mask=mask)
    v = tl.load(v_ptr + token * stride_xt + head * stride_xh + offs_d[None, :], mask=mask)
    k = (k.to(tl.float32) * k_inv_scale).to(k_cache_ptr.dtype.element_ty)

    if HAS_SUMMARY:
        before = slot % VECTOR  # tokens of the vector before this one
        if (next_slot != slot + 1) | (before == VECTOR - 1):
            total = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
            for step in tl.static_range(1, VECTOR):
                back = VECTOR - step
                source = token - back
                source_slot = tl.load(slot_ptr + source, mask=source >= 0, other=-1)
                fresh = source_slot == slot - back
                new = tl.load(
                    k_ptr + source * stride_kt + head * stride_kh + offs_d[None, :],
                    mask=mask & (back <= before) & fresh,
                    other=0.0,
                )
                old = tl.load(
                    k_page + (row - back) * stride_ct,
                    mask=mask & (back <= before) & (not fresh),
                    other=0.0,
                )
                new = (new.to(tl.float32) * k_inv_scale).to(k_cache_ptr.dtype.element_ty)
                total += new.to(tl.float32) + old.to(tl.float32)
            total += tl.where(mask, k.to(tl.float32), 0.0)
            mean = tl.div_rn(total, tl.full([BLOCK_H, BLOCK_D], 1.0, tl.float32) * (before + 1))
            write_vector(
                summary_ptr + page * stride_sp + offs_h.to(tl.int64) * stride_sh,
                mean,
                row // VECTOR,
                offs_h < NUM_HEADS,
                HEAD_DIM,
                ROTATION,
            )

    v = (v.to(tl.float32) * v_inv_scale).to(v_cache_ptr.dtype.element_ty)
    tl.store(k_page + row * stride_ct, k, mask=mask)
    tl.store(v_page + row * stride_vt, v, mask=mask)

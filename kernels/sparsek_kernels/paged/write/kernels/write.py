"""Storing new keys and values in a paged cache, and the records that they complete (record.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.page_records.kernels.write import write_keys
from sparsek_kernels.paged.kernels.record import SEGMENT, VECTORS


@triton.jit
def step_tokens(slot_ptr, num_tokens, wanted):
    """The step's token that each slot ``wanted [N]`` is written by, -1 for none."""
    found = wanted.to(tl.int32) * 0 - 1
    for start in range(0, num_tokens, SEGMENT):
        tokens = start + tl.arange(0, SEGMENT)
        slots = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=-1)
        same = wanted[:, None] == slots[None, :]
        found = tl.maximum(found, tl.max(tl.where(same, tokens[None, :], -1), axis=1))
    return found


@triton.jit
def segment_keys(
    cache, k_ptr, slot_ptr, num_tokens, first_slot, first_row,
    k_inv_scale, stride_ct, stride_kt, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Every second key of a segment as its page will hold it, ``[VECTORS, 4, BLOCK_Q]`` float32.

    Keys of this step are taken from the step: other programs are storing them.

    first_slot, first_row: of the first of these keys, in the cache and in its page.
    """
    QUARTER: tl.constexpr = HEAD_DIM // 4
    vector, offs = 2 * tl.arange(0, VECTORS), tl.arange(0, BLOCK_Q)
    channel = (tl.arange(0, 4)[:, None] * QUARTER + offs[None, :])[None, :, :]
    inside = (offs < QUARTER)[None, None, :]
    token = step_tokens(slot_ptr, num_tokens, first_slot + vector)[:, None, None]
    row = (first_row + vector).to(tl.int64)[:, None, None]
    old = tl.load(cache + row * stride_ct + channel, mask=inside & (token < 0), other=0.0)
    at = k_ptr + token.to(tl.int64) * stride_kt + channel
    new = tl.load(at, mask=inside & (token >= 0), other=0.0)
    new = (new.to(tl.float32) * k_inv_scale).to(old.dtype)
    return tl.where(token >= 0, new.to(tl.float32), old.to(tl.float32))


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(
    k_cache_ptr, v_cache_ptr, record_ptr, k_ptr, v_ptr, slot_ptr,
    num_tokens, k_inv_scale, v_inv_scale,
    stride_cp, stride_ch, stride_ct,
    stride_vp, stride_vh, stride_vt,
    stride_kt, stride_kh,
    stride_xt, stride_xh,
    record_strides,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RECORDS: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One program: one token, ``BLOCK_H`` KV heads.

    With ``RECORDS`` there is one head, and the record of the segment of which the token's slot is
    the last one.  With ``TRIGGER`` a next kernel that waits for this one may start meanwhile.
    """
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
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
    v = (v.to(tl.float32) * v_inv_scale).to(v_cache_ptr.dtype.element_ty)
    tl.store(k_page + row * stride_ct, k, mask=mask)
    tl.store(v_page + row * stride_vt, v, mask=mask)
    if RECORDS and slot % SEGMENT == SEGMENT - 1:
        BLOCK_Q: tl.constexpr = BLOCK_D // 4
        kv_head = tl.program_id(1).to(tl.int64)
        cache = k_cache_ptr + page * stride_cp + kv_head * stride_ch
        keys = k_ptr + kv_head * stride_kh
        slot -= SEGMENT - 1
        row -= SEGMENT - 1
        first = segment_keys(
            cache, keys, slot_ptr, num_tokens, slot, row,
            k_inv_scale, stride_ct, stride_kt, HEAD_DIM, BLOCK_Q,
        )  # fmt: skip
        second = segment_keys(
            cache, keys, slot_ptr, num_tokens, slot + 1, row + 1,
            k_inv_scale, stride_ct, stride_kt, HEAD_DIM, BLOCK_Q,
        )  # fmt: skip
        stride_rp, stride_rh, stride_rs = record_strides
        record = record_ptr + page * stride_rp + kv_head * stride_rh
        write_keys(record + row // SEGMENT * stride_rs, first, second, HEAD_DIM)

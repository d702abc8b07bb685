"""Logits of single tokens over the vectors of records, and what a head's probabilities share.

The rule is docs/selection.md.  Logits are kept in base 2 (scaled by ``log2(e)``) throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.paged.kernels.record import (
    SEGMENT,
    VECTORS,
    base_at,
    mean_at,
    of_e5m2_code,
    pairs_at,
    scale_of,
    scales_at,
    size_of,
    variance_at,
)
from sparsek_kernels.paged.kernels.tiles import TOP_K, tile_sees_all

UNIT: tl.constexpr = tl.constexpr(16)
"""Segments whose cells are summed together for a head's total."""


@triton.jit
def levels_of(packed, PLANE: tl.constexpr, scales):
    """Levels of a quarter of the channels, ``[vectors, channels]`` float16, times pairs' scales.

    packed: ``[segments, vectors, channels]`` uint8; scales: ``[segments, channels]`` float16.
    """
    code = ((packed >> (6 - 2 * PLANE)) & 3) ^ 2
    level = (2.0 * code.to(tl.float16) - 3.0) * scales[:, None, :]
    return tl.reshape(level, [packed.shape[0] * packed.shape[1], packed.shape[2]])


@triton.jit
def sees_all(position, dense_below, RULE: tl.constexpr):
    """Whether the token at ``position`` attends everything."""
    return tile_sees_all(
        position, dense_below, TOP_K, 1,
        SEGMENT // VECTORS, RULE.SINK_BLOCKS, RULE.REACH_BLOCKS, RULE.SCORED_BLOCKS, VECTORS,
    )  # fmt: skip


@triton.jit
def near_total(
    near_ptr, q_ptr, k_ptr,
    table, position, q_row, head, mask_m, qk_scale, sinks_end, first_local,
    stride_qh,
    k_strides,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Write a token's log of the sum of exps of its keys before ``sinks_end`` and from
    ``first_local`` on, ``[BLOCK_M]`` heads.
    """
    stride_kp, _stride_kh, stride_kt = k_strides
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, SEGMENT)
    q = tl.load(
        q_ptr + q_row + (head.to(tl.int64) * stride_qh)[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    sinks = sinks_end // SEGMENT
    count = sinks + position // SEGMENT + 1 - first_local // SEGMENT
    for n in tl.range(0, count, num_stages=2):
        segment = tl.where(n < sinks, n, first_local // SEGMENT + n - sinks)
        page = tl.load(table + segment * SEGMENT // PAGE_SIZE).to(tl.int64)
        keys = segment * SEGMENT + offs_n
        mask = (keys <= position) & (page >= 0)
        row = tl.maximum(page, 0) * stride_kp + (keys % PAGE_SIZE) * stride_kt
        k = tl.load(
            k_ptr + row[:, None] + offs_d[None, :],
            mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * qk_scale
        logits = tl.where(mask[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        row_sum = row_sum * tl.exp2(row_max - new_max)
        row_sum += tl.sum(tl.exp2(logits - new_max[:, None]), axis=1)
        row_max = new_max
    total = tl.where(row_sum > 0.0, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(near_ptr + head, total, mask=mask_m)


@triton.jit(do_not_specialize=["first_request", "dense_below"])
def score_records_kernel(
    rest_ptr, base_ptr, gain_ptr, unit_ptr, near_ptr, count_ptr, q_ptr, k_ptr, records_ptr,
    block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, dense_below, first_request, width, q_strides, k_strides, record_strides,
    stride_br,
    RULE: tl.constexpr, SHAPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits of all decoded tokens of one request and one KV head, for a share of the records.

    The last ``QUERY_LEN`` programs of the first dimension take a token's sinks and own segment
    each; the others take every so many-th unit of segments, so that the grid need not grow with
    the longest context allowed.  Row ``j * BLOCK_H + h`` of the tile is token ``j``, query head
    ``h`` of the group.

    Writes, for ``T`` tokens and ``width`` segments of each: the logit of a segment's mean key and
    what the variance of its keys adds, ``[T, Hq, width]`` float32; what each vector adds to the
    mean, ``[T, Hq, width * 32]`` float16; logs of sums of exps of units of 16 segments,
    ``[T, Hq, width / 16]``, and of the keys that are read, ``[T, Hq]``.  Clears the counts,
    ``[R, Hkv, KEYS]`` int32.
    """
    SINK_BLOCKS: tl.constexpr = RULE.SINK_BLOCKS
    REACH_BLOCKS: tl.constexpr = RULE.REACH_BLOCKS
    KEYS: tl.constexpr = RULE.KEYS
    QUERY_LEN: tl.constexpr = SHAPE.QUERY_LEN
    GROUP: tl.constexpr = SHAPE.GROUP
    NUM_KV_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    RECORD: tl.constexpr = SHAPE.RECORD
    CELLS: tl.constexpr = VECTORS  # of a segment
    QUARTER: tl.constexpr = HEAD_DIM // 4
    BLOCK_Q: tl.constexpr = triton.next_power_of_2(QUARTER) if QUARTER > 16 else 16
    stride_qt, stride_qh = q_strides
    stride_rp, stride_rh = record_strides
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(1)
    local_request = tl.program_id(2)
    request = first_request + local_request
    table = block_table_ptr + request.to(tl.int64) * stride_br
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_token = tl.load(cu_seqlens_ptr + request).to(tl.int32)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1).to(tl.int32) - first_token
    if num_tokens <= 0:
        return
    SINK_SEGMENTS: tl.constexpr = SINK_BLOCKS // CELLS
    REACH_SEGMENTS: tl.constexpr = REACH_BLOCKS // CELLS
    start = seq_len - num_tokens
    if sees_all(start, dense_below, RULE):
        return
    own = start // SEGMENT  # the first token's segment: those before it have records
    last = tl.maximum(own - REACH_SEGMENTS, 0)  # first segment of the window
    shares = tl.num_programs(0) - QUERY_LEN
    share = tl.program_id(0)
    offs_m = tl.arange(0, BLOCK_M)
    if share >= shares:
        token = share - shares
        if token < num_tokens:
            if token == 0:
                bins = tl.arange(0, KEYS)
                counts = (local_request * NUM_KV_HEADS + kv_head).to(tl.int64) * KEYS
                tl.store(count_ptr + counts + bins, bins * 0)
            place = (local_request * QUERY_LEN + token).to(tl.int64)
            NEAR_M: tl.constexpr = BLOCK_H if BLOCK_H > 16 else 16
            offs_n = tl.arange(0, NEAR_M)
            near_total(
                near_ptr + place * NUM_KV_HEADS * GROUP, q_ptr,
                k_ptr + kv_head.to(tl.int64) * k_strides[1], table, start + token,
                (first_token + token).to(tl.int64) * stride_qt, kv_head * GROUP + offs_n,
                offs_n < GROUP, qk_scale,
                tl.minimum(SINK_SEGMENTS, own) * SEGMENT, own * SEGMENT,
                stride_qh, k_strides,
                HEAD_DIM, triton.next_power_of_2(HEAD_DIM), NEAR_M, PAGE_SIZE,
            )  # fmt: skip
        return
    token = offs_m // BLOCK_H
    member = offs_m % BLOCK_H
    mask_m = (token < num_tokens) & (member < GROUP)
    head = kv_head * GROUP + member
    offs_b = tl.arange(0, BLOCK_Q)
    mask_q = (offs_b < QUARTER)[:, None] & mask_m[None, :]
    q_row = (first_token + token).to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q_at = q_ptr + q_row[None, :] + offs_b[:, None]
    q0 = tl.load(q_at, mask=mask_q, other=0.0)  # [BLOCK_Q, BLOCK_M]
    q1 = tl.load(q_at + QUARTER, mask=mask_q, other=0.0)
    q2 = tl.load(q_at + 2 * QUARTER, mask=mask_q, other=0.0)
    q3 = tl.load(q_at + 3 * QUARTER, mask=mask_q, other=0.0)
    largest = tl.maximum(
        tl.max(tl.abs(q0.to(tl.float32)), axis=0), tl.max(tl.abs(q1.to(tl.float32)), axis=0)
    )
    largest = tl.maximum(largest, tl.max(tl.abs(q2.to(tl.float32)), axis=0))
    largest = tl.maximum(largest, tl.max(tl.abs(q3.to(tl.float32)), axis=0))
    largest = tl.where(largest > 0.0, largest, 1.0)
    # A power of two, so that a query of 16 bits stays what it is: keys may be hundreds.
    largest = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    f0 = q0.to(tl.float32) / largest[None, :]
    f1 = q1.to(tl.float32) / largest[None, :]
    f2 = q2.to(tl.float32) / largest[None, :]
    f3 = q3.to(tl.float32) / largest[None, :]
    squares_low = (f0 * f0 + f2 * f2).to(tl.float16)
    squares_high = (f1 * f1 + f3 * f3).to(tl.float16)
    h0 = f0.to(tl.float16)
    h1 = f1.to(tl.float16)
    h2 = f2.to(tl.float16)
    h3 = f3.to(tl.float16)
    factor = largest * qk_scale
    variance_factor = factor * LN2 * factor * LN2
    place = (local_request * QUERY_LEN + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    records = records_ptr + kv_head.to(tl.int64) * stride_rh
    offs_u = tl.arange(0, UNIT)
    offs_v = tl.arange(0, VECTORS)
    first_unit = SINK_SEGMENTS // UNIT
    for unit in tl.range(
        first_unit + share, tl.minimum(tl.cdiv(own, UNIT), width // UNIT), shares, num_stages=1
    ):
        segment = unit * UNIT + offs_u
        there = segment < own
        page = tl.load(table + segment * SEGMENT // PAGE_SIZE, mask=there, other=-1)
        here = page >= 0
        there = there & here
        record = records + tl.maximum(page, 0).to(tl.int64) * stride_rp
        record += (segment * SEGMENT % PAGE_SIZE) // SEGMENT * RECORD
        tail = record[:, None] + offs_b[None, :]
        mask_t = there[:, None] & (offs_b < QUARTER)[None, :]
        means = (tail + (mean_at(HEAD_DIM) + offs_b[None, :])).to(tl.pointer_type(tl.float16))
        mean = tl.zeros([UNIT, BLOCK_M], dtype=tl.float32)
        if q_ptr.dtype.element_ty == tl.float32:
            c0 = tl.load(means, mask=mask_t, other=0.0).to(tl.float32)
            c1 = tl.load(means + QUARTER, mask=mask_t, other=0.0).to(tl.float32)
            c2 = tl.load(means + 2 * QUARTER, mask=mask_t, other=0.0).to(tl.float32)
            c3 = tl.load(means + 3 * QUARTER, mask=mask_t, other=0.0).to(tl.float32)
            mean = tl.dot(c0, f0, mean, input_precision="ieee")
            mean = tl.dot(c1, f1, mean, input_precision="ieee")
            mean = tl.dot(c2, f2, mean, input_precision="ieee")
            mean = tl.dot(c3, f3, mean, input_precision="ieee")
        else:
            mean = tl.dot(tl.load(means, mask=mask_t, other=0.0), h0, mean)
            mean = tl.dot(tl.load(means + QUARTER, mask=mask_t, other=0.0), h1, mean)
            mean = tl.dot(tl.load(means + 2 * QUARTER, mask=mask_t, other=0.0), h2, mean)
            mean = tl.dot(tl.load(means + 3 * QUARTER, mask=mask_t, other=0.0), h3, mean)
        base = mean * factor[None, :]
        variances = tail + variance_at(HEAD_DIM)
        low_pairs = of_e5m2_code(tl.load(variances, mask=mask_t, other=0))
        high_pairs = of_e5m2_code(tl.load(variances + QUARTER, mask=mask_t, other=0))
        variance = tl.dot(low_pairs, squares_low)
        variance = tl.dot(high_pairs, squares_high, variance)
        gain = (tl.sqrt(1.0 + variance_factor[None, :] * variance) - 1.0) * LOG2E
        pairs = tl.load(tail + pairs_at(HEAD_DIM), mask=mask_t, other=0).to(tl.int32)
        top = tl.load(record + base_at(HEAD_DIM), mask=there, other=0).to(tl.int32)
        exponent = top >> 1  # scales are relative to this power of two
        low = size_of((top - 2 * exponent)[:, None] - (pairs & 15) + 128).to(tl.float16)
        high = size_of((top - 2 * exponent)[:, None] - (pairs >> 4) + 128).to(tl.float16)
        packed = tl.load(
            (record[:, None] + offs_v[None, :] * QUARTER)[:, :, None] + offs_b[None, None, :],
            mask=(there[:, None] & (offs_v < VECTORS)[None, :])[:, :, None]
            & (offs_b < QUARTER)[None, None, :],
            other=0,
        )  # [UNIT, VECTORS, BLOCK_Q]
        sums = tl.dot(levels_of(packed, 0, low), h0)
        sums = tl.dot(levels_of(packed, 1, high), h1, sums)
        sums = tl.dot(levels_of(packed, 2, low), h2, sums)
        sums = tl.dot(levels_of(packed, 3, high), h3, sums)
        sizes = tl.load(
            (record + scales_at(HEAD_DIM))[:, None] + offs_v[None, :],
            mask=there[:, None] & (offs_v < VECTORS)[None, :],
            other=0,
        ).to(tl.int32)
        sizes = scale_of(sizes) * size_of(2 * exponent)[:, None]  # [UNIT, VECTORS]
        rest = tl.reshape(sums, [UNIT, VECTORS, BLOCK_M]) * sizes[:, :, None]
        rest = rest * factor[None, None, :]
        summed = there & (segment >= SINK_SEGMENTS)  # [UNIT]
        logits = tl.where(summed[:, None, None], base[:, None, :] + rest, float("-inf"))
        highest = tl.max(tl.max(logits, axis=1), axis=0)  # [BLOCK_M]
        reference = tl.where(highest > float("-inf"), highest, 0.0)
        total = tl.sum(tl.sum(tl.exp2(logits - reference[None, None, :]), axis=1), axis=0)
        total = tl.where(total > 0.0, reference + tl.log2(total) + 1.0, float("-inf"))
        tl.store(unit_ptr + place * (width // UNIT) + unit, total, mask=mask_m)
        mask_s = mask_m[None, :] & (segment < last)[:, None]
        at = place[None, :] * width + segment[:, None]
        tl.store(base_ptr + at, tl.where(here[:, None], base, float("-inf")), mask=mask_s)
        tl.store(gain_ptr + at, tl.where(here[:, None], gain, float("-inf")), mask=mask_s)
        rest = tl.where(here[:, None, None], rest, float("-inf"))
        tl.store(
            rest_ptr + (at[:, None, :] * VECTORS + offs_v[None, :, None]),
            rest.to(tl.float16),
            mask=mask_s[:, None, :],
        )

"""Choosing cells by their probabilities: integer keys, counts of them, weights, a sample.

The rule is docs/selection.md.  Nothing here depends on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.page_records.kernels.scores import UNIT, sees_all
from sparsek_kernels.paged.kernels.record import SEGMENT, VECTORS
from sparsek_kernels.paged.kernels.sample import (
    CELL_BITS,
    SPREAD,
    WHOLE_BITS,
    first_key_of,
    first_sum,
    steps_and_shares,
    threshold_steps,
)
from sparsek_kernels.paged.sample import THREADS as _THREADS

THREADS = tl.constexpr(_THREADS)


@triton.jit
def request_range(request, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE: tl.constexpr):
    """Position of a request's first token, how many it has, and the end of segments that compete.

    The end is 0 where there are no tokens, and where they see everything.  The last number is the
    first token's own segment.
    """
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_token = tl.load(cu_seqlens_ptr + request).to(tl.int32)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1).to(tl.int32) - first_token
    position = seq_len - num_tokens
    own = tl.minimum(position // SEGMENT, width)  # a row of scratch has no more
    last = tl.maximum(own - RULE.REACH_BLOCKS // VECTORS, 0)
    full = sees_all(position, dense_below, RULE)
    return position, num_tokens, tl.where(full | (num_tokens <= 0), 0, last), own


@triton.jit(do_not_specialize=["first_request", "dense_below"])
def total_kernel(
    total_ptr, unit_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request, width,
    RULE: tl.constexpr, SHAPE: tl.constexpr, UNITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Log of the sum of exps of one token's and query head's keys that are read, and of its cells.

    Takes that of the keys and writes the total in its place, ``[R * QUERY_LEN, Hq]``
    float32.
    """
    SINK_SEGMENTS: tl.constexpr = RULE.SINK_BLOCKS // VECTORS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1)
    request, token = tile // SHAPE.QUERY_LEN, tile % SHAPE.QUERY_LEN
    _position, num_tokens, last, own = request_range(
        first_request + request, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE
    )
    if (token >= num_tokens) | (last <= SINK_SEGMENTS):
        return
    line = tile.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    offs_u = tl.arange(0, UNITS)
    first_unit: tl.constexpr = SINK_SEGMENTS // UNIT
    units = tl.cdiv(own, UNIT)
    unit = unit_ptr + line * (width // UNIT) + offs_u
    near = tl.load(total_ptr + line)
    top = near
    for begin in tl.range(first_unit, units, UNITS):
        part = tl.load(unit + begin, mask=begin + offs_u < units, other=float("-inf"))
        top = tl.maximum(top, tl.max(part, axis=0))
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.exp2(near - top)
    for begin in tl.range(first_unit, units, UNITS):
        part = tl.load(unit + begin, mask=begin + offs_u < units, other=float("-inf"))
        total += tl.sum(tl.exp2(part - top), axis=0)
    tl.store(total_ptr + line, top + tl.log2(total))


@triton.jit(do_not_specialize=["first_request", "dense_below"])
def rank_cells_kernel(
    key_ptr, count_ptr, rest_ptr, base_ptr, gain_ptr, total_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request, width,
    RULE: tl.constexpr, SHAPE: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Keys of ``CHUNK`` segments' cells of one request and KV head, and how many there are of each.

    A cell's key is its probability, summed over the request's tokens and the group's heads, to two
    bits behind the leading one; 0 on a page of another rank.  Writes ``[R, Hkv, width * 32]`` int8
    and adds to ``[R, Hkv, KEYS]`` int32.
    """
    GROUP: tl.constexpr = SHAPE.GROUP
    KEYS: tl.constexpr = RULE.KEYS
    SINK_SEGMENTS: tl.constexpr = RULE.SINK_BLOCKS // VECTORS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * CHUNK
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    _position, num_tokens, last, _own = request_range(
        first_request + request, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE
    )
    if first >= last:
        return
    segment = first + tl.arange(0, CHUNK)
    competes = (segment >= SINK_SEGMENTS) & (segment < last)
    cell = first * VECTORS + tl.arange(0, CHUNK * VECTORS)
    score = tl.zeros([CHUNK, VECTORS], dtype=tl.float32)
    place = request.to(tl.int64) * SHAPE.QUERY_LEN
    for token in tl.range(0, num_tokens):
        for member in tl.static_range(GROUP):
            line = (place + token) * (SHAPE.NUM_KV_HEADS * GROUP) + kv_head * GROUP + member
            above = tl.load(total_ptr + line) - 1.0  # a cell has two keys
            base = tl.load(base_ptr + line * width + segment, mask=competes, other=float("-inf"))
            gain = tl.load(gain_ptr + line * width + segment, mask=competes, other=0.0)
            rest = tl.load(
                rest_ptr + line * width * VECTORS + cell, mask=cell < last * VECTORS, other=0.0
            )
            rest = tl.reshape(rest.to(tl.float32), [CHUNK, VECTORS])
            score += tl.exp2((base + gain - above)[:, None] + rest)
    score = tl.where(score > 0.0, score, 0.0)
    first_key = first_key_of(RULE.SCORED_BLOCKS, num_tokens * GROUP)
    key = (score.to(tl.int32, bitcast=True) >> 21) - first_key
    key = tl.minimum(tl.maximum(key, 0), KEYS - 1)
    key = tl.where(competes[:, None], key, -1)
    key = tl.reshape(key, [CHUNK * VECTORS])
    unit = (request * SHAPE.NUM_KV_HEADS + kv_head).to(tl.int64)
    tl.store(key_ptr + unit * width * VECTORS + cell, key.to(tl.int8), mask=cell < last * VECTORS)
    counts = tl.histogram(tl.maximum(key, 0), KEYS, mask=key >= 0)
    bins = tl.arange(0, KEYS)
    tl.atomic_add(count_ptr + unit * KEYS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["first_request", "dense_below"])
def list_cells_kernel(
    out_ptr, key_ptr, count_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request, width,
    stride_ot, stride_oh,
    RULE: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, SHARDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The sample of cells of one request and KV head, by their keys.

    Writes ``[R, Hkv, SCORED_BLOCKS]`` int32, entries of ``sample.py``; -1 for tokens that see
    everything.  With ``SHARDED`` the keys come from all ranks, and this kernel counts them.
    """
    KEYS: tl.constexpr = RULE.KEYS
    COUNT: tl.constexpr = RULE.SCORED_BLOCKS
    SINK_SEGMENTS: tl.constexpr = RULE.SINK_BLOCKS // VECTORS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = first_request + request
    position, num_tokens, last, _own = request_range(
        row, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE
    )
    if num_tokens <= 0:
        return
    out = out_ptr + row.to(tl.int64) * stride_ot + kv_head * stride_oh
    offs = tl.arange(0, BLOCK)
    unit = (request * SHAPE.NUM_KV_HEADS + kv_head).to(tl.int64)
    keys = key_ptr + unit * width * VECTORS
    first: tl.constexpr = SINK_SEGMENTS * VECTORS
    end = last * VECTORS
    filled = 0
    if end - first > COUNT:  # else they see everything, or rows are too short
        if SHARDED:
            counts = tl.zeros([KEYS], dtype=tl.int32)
            for begin in tl.range(first, end, BLOCK):
                mask = begin + offs < end
                key = tl.load(keys + begin + offs, mask=mask, other=0).to(tl.int32)
                counts += tl.histogram(key, KEYS, mask=mask)
        else:
            counts = tl.load(count_ptr + unit * KEYS + tl.arange(0, KEYS))
        threshold = threshold_steps(counts, COUNT, KEYS)
        total = first_sum(position, SPREAD)
        turn = offs % VECTORS
        ordered = offs - turn + turn % (VECTORS // THREADS) * THREADS + turn // (VECTORS // THREADS)
        for begin in tl.range(first, end, BLOCK):
            cell = begin + ordered
            key = tl.load(keys + cell, mask=cell < end, other=0).to(tl.int32)
            steps, share = steps_and_shares(key, threshold)
            share = tl.where(cell < end, share, 0)
            until = total + tl.cumsum(share, axis=0)
            place = (until - share).to(tl.uint32) >> WHOLE_BITS
            drawn = (until.to(tl.uint32) >> WHOLE_BITS > place) & (place < COUNT)
            tl.store(out + place, cell + (steps << CELL_BITS), mask=drawn)
            total += tl.sum(share, axis=0)
        filled = (total.to(tl.uint32) >> WHOLE_BITS).to(tl.int32)
    for begin in tl.range(filled, COUNT, BLOCK):
        tl.store(out + begin + offs, offs * 0 - 1, mask=begin + offs < COUNT)

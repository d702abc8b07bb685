"""Choosing cells by their probabilities: integer keys, counts of them, a threshold, a list.

The rule is docs/selection.md.  Nothing here depends on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.index.page_records.kernels.scores import UNIT, sees_all
from sparsek_kernels.paged.kernels.record import SEGMENT, VECTORS


@triton.jit
def request_range(request, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE: tl.constexpr):
    """A request's first token, how many it has, and the end of the segments that compete for them.

    The end is 0 where there are no tokens, and where they see everything.  The last number is the
    first token's own segment.
    """
    seq_len = tl.load(seq_lens_ptr + request)
    first_token = tl.load(cu_seqlens_ptr + request)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1) - first_token
    position = seq_len - num_tokens
    own = tl.minimum(position // SEGMENT, width)  # a row of scratch has no more
    last = tl.maximum(own - RULE.REACH_BLOCKS // VECTORS, 0)
    full = sees_all(position, dense_below, RULE)
    return first_token, num_tokens, tl.where(full | (num_tokens <= 0), 0, last), own


@triton.jit
def first_key_of(rows, RULE: tl.constexpr):
    """``config.first_key`` for ``rows`` tokens and heads that choose together."""
    share = tl.maximum(RULE.SCORED_BLOCKS // rows, 1).to(tl.float32)
    octave = share.to(tl.int32, bitcast=True) >> 23  # 127 more
    return ((254 - octave) << 2) - (RULE.KEYS - 1)


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
    _first_token, num_tokens, last, own = request_range(
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
    _first_token, num_tokens, last, _own = request_range(
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
    key = (score.to(tl.int32, bitcast=True) >> 21) - first_key_of(num_tokens * GROUP, RULE)
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
    out_ptr, cut_ptr, key_ptr, count_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request, width,
    stride_ot, stride_oh,
    RULE: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, SHARDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The ``SCORED_BLOCKS`` cells of the largest keys of one request and KV head, ascending.

    Ties go to the lower index.  Writes ``[R, Hkv, SCORED_BLOCKS]`` int32, -1 for tokens that see
    everything, and ``[R, Hkv, 2]`` int32: the smallest key that is chosen, and the last cell that
    is chosen with that key.  With ``SHARDED`` the keys come
    from all ranks, and this kernel counts them.
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
    _first_token, num_tokens, last, _own = request_range(
        row, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE
    )
    if num_tokens <= 0:
        return
    out = out_ptr + row.to(tl.int64) * stride_ot + kv_head * stride_oh
    offs = tl.arange(0, BLOCK)
    if (last - SINK_SEGMENTS) * VECTORS < COUNT:  # they see everything, or rows are too short
        for begin in tl.range(0, COUNT, BLOCK):
            tl.store(out + begin + offs, offs * 0 - 1, mask=begin + offs < COUNT)
        return
    unit = (request * SHAPE.NUM_KV_HEADS + kv_head).to(tl.int64)
    keys = key_ptr + unit * width * VECTORS
    first: tl.constexpr = SINK_SEGMENTS * VECTORS
    if SHARDED:
        counts = tl.zeros([KEYS], dtype=tl.int32)
        for begin in tl.range(first, last * VECTORS, BLOCK):
            mask = begin + offs < last * VECTORS
            key = tl.load(keys + begin + offs, mask=mask, other=0).to(tl.int32)
            counts += tl.histogram(key, KEYS, mask=mask)
    else:
        counts = tl.load(count_ptr + unit * KEYS + tl.arange(0, KEYS))
    reach = tl.cumsum(counts, axis=0, reverse=True)  # keys from each one up
    threshold = tl.sum((reach >= COUNT).to(tl.int32), axis=0) - 1
    above = tl.max(tl.where(reach < COUNT, reach, 0), axis=0)
    needed = COUNT - above
    found = 0
    equal = 0
    cut = -1
    for begin in tl.range(first, last * VECTORS, BLOCK):
        cell = begin + offs
        key = tl.load(keys + cell, mask=cell < last * VECTORS, other=-1).to(tl.int32)
        more = (key > threshold).to(tl.int32)
        same = (key == threshold).to(tl.int32)
        ranks = tl.cumsum(more + (same << 16), axis=0)
        rank_more = ranks & 0xFFFF
        rank_same = equal + (ranks >> 16)
        chosen = (more > 0) | ((same > 0) & (rank_same <= needed))
        place = found + rank_more + tl.minimum(rank_same, needed) - 1
        tl.store(out + place, cell, mask=chosen)
        cut = tl.maximum(cut, tl.max(tl.where((same > 0) & chosen, cell, -1), axis=0))
        found += tl.sum(more, axis=0)
        equal += tl.sum(same, axis=0)
    tl.store(cut_ptr + 2 * unit, threshold)
    tl.store(cut_ptr + 2 * unit + 1, cut)


@triton.jit(do_not_specialize=["first_request", "dense_below"])
def tail_kernel(
    tail_ptr, cut_ptr, key_ptr, rest_ptr, base_ptr, seq_lens_ptr, cu_seqlens_ptr,
    dense_below, first_request, width,
    stride_tt, stride_th,
    RULE: tl.constexpr, SHAPE: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits of what ``CHUNK`` segments' cells that are not chosen weigh, ``[T, Hq, width]``."""
    GROUP: tl.constexpr = SHAPE.GROUP
    SINK_SEGMENTS: tl.constexpr = RULE.SINK_BLOCKS // VECTORS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * CHUNK
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    first_token, num_tokens, last, _own = request_range(
        first_request + request, seq_lens_ptr, cu_seqlens_ptr, dense_below, width, RULE
    )
    if first >= last:
        return
    unit = (request * SHAPE.NUM_KV_HEADS + kv_head).to(tl.int64)
    threshold = tl.load(cut_ptr + 2 * unit)
    cut = tl.load(cut_ptr + 2 * unit + 1)
    segment = first + tl.arange(0, CHUNK)
    competes = (segment >= SINK_SEGMENTS) & (segment < last)
    cell = first * VECTORS + tl.arange(0, CHUNK * VECTORS)
    key = tl.load(key_ptr + unit * width * VECTORS + cell, mask=cell < last * VECTORS, other=-1)
    left = (key >= 0) & ((key < threshold) | ((key == threshold) & (cell > cut)))
    left = tl.reshape(left, [CHUNK, VECTORS])
    place = request.to(tl.int64) * SHAPE.QUERY_LEN
    for token in tl.range(0, num_tokens):
        for member in tl.static_range(GROUP):
            head = kv_head * GROUP + member
            line = (place + token) * (SHAPE.NUM_KV_HEADS * GROUP) + head
            base = tl.load(base_ptr + line * width + segment, mask=competes, other=float("-inf"))
            rest = tl.load(
                rest_ptr + line * width * VECTORS + cell, mask=cell < last * VECTORS, other=0.0
            )
            rest = tl.reshape(rest.to(tl.float32), [CHUNK, VECTORS])
            rest = tl.where(left, rest, float("-inf"))
            top = tl.max(rest, axis=1)
            top = tl.where(top > float("-inf"), top, 0.0)
            total = tl.sum(tl.exp2(rest - top[:, None]), axis=1)
            logit = tl.where(total > 0.0, base + top + tl.log2(total) + 1.0, float("-inf"))
            at = tail_ptr + (first_token + token).to(tl.int64) * stride_tt + head * stride_th
            tl.store(at + segment, logit, mask=competes)

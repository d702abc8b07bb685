"""Which cells are chosen by their weights, and what is left of segments (Gluon).

The rule is docs/selection.md.  A *group* of programs serves a request's rows of one KV head.  Of a
segment 8 threads have every eighth cell:

1. Cells have their scores, and these their integer keys.  Programs leave how many cells they have
   of each key.
2. With the counts of the whole group the smallest key that is chosen is known, and how many cells
   are chosen before a program's own: it writes its part of the list, and what is left of its
   segments.

Programs start in the order of their numbers, and a group has fewer than run at once: those that
wait wait for programs that run.  Everything that programs exchange is stored by its owner and added
up in one order: results do not depend on timing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparsek_kernels.common.kernels.barrier_sm90 import thread_barrier
from sparsek_kernels.paged.index.page_records.kernels.counts_sm80 import (
    bits_of,
    clear_counters,
    count_key,
    counters_of_keys,
    fold,
    last_of_warp,
    lowest_bits,
    masks_of,
    read_counters,
    shuffle_up,
)

WARPS: gl.constexpr = gl.constexpr(4)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def weight_of(word, AT: gl.constexpr):
    """Byte ``AT`` of words as a float32 weight."""
    bits = word >> 4 if AT == 3 else word << (20 - 8 * AT)
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x0FF00000, 0x30000000, 0xEA;", "=r,r", [bits],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def byte_of(word, AT: gl.constexpr):
    """Byte ``AT`` of words: keys; below all of them where it is 64, outside."""
    return ((word << (25 - 8 * AT)) >> 25) if AT < 3 else ((word << 1) >> 25)


@gluon.jit
def two_words(turn, PAIR: gl.constexpr, ROWS: gl.constexpr):
    """Weights of two columns for a thread's four cells, of ``[16, 8, COLUMNS]``: two words."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    a, b = gl.split(turn.slice(2 * PAIR, 2, dim=2).load(LINE))
    return (
        gl.convert_layout(a, ROWS, assert_trivial=True),
        gl.convert_layout(b, ROWS, assert_trivial=True),
    )


@gluon.jit
def two_shares(turn, PAIR: gl.constexpr, ROWS: gl.constexpr):
    """What a thread's segment has of two columns, of ``[16, COLUMNS]``: ``[16, 1]`` each."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    x = turn.slice(2 * PAIR, 2, dim=1).load(gl.SliceLayout(1, LINE))
    a, b = gl.split(x[:, None, :] + gl.zeros([16, 8, 2], gl.float32, LINE))
    return (
        gl.convert_layout(a, ROWS, assert_trivial=True),
        gl.convert_layout(b, ROWS, assert_trivial=True),
    )


@gluon.jit
def key_of(score, inside, first_key, KEYS: gl.constexpr):
    """Integer keys of scores; one more than the last outside."""
    score = gl.where(score > 0.0, score, 0.0)
    key = (score.to(gl.int32, bitcast=True) >> 21) - first_key
    return gl.where(inside, gl.minimum(gl.maximum(key, 0), KEYS - 1), KEYS)


@gluon.jit
def arrive(counter_ptr):
    """Tell the group that what this program left for it is there."""
    thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def wait_for(counter_ptr, count):
    """Wait until ``count`` programs have arrived."""
    while gl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass
    thread_barrier()


@gluon.jit
def leave(counters, active):
    """The last program of a group clears its counters for the next launch."""
    thread_barrier()
    if gl.atomic_add(counters + 1, 1, sem="acq_rel") == active - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit(do_not_specialize=["dense_below", "members", "sums", "segments", "width"])
def cut_cells_kernel(
    out_ptr,
    tail_ptr,
    count_ptr,
    counter_ptr,
    weights_ptr,
    tops_ptr,
    gains_ptr,
    state_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    dense_below,
    members,
    sums,
    segments,
    width,
    out_strides,
    tail_strides,
    RULE: gl.constexpr,
    SHAPE: gl.constexpr,
    MOST: gl.constexpr,
    SUMS: gl.constexpr,
    TURNS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """The chosen cells of requests, ascending, and the logits of what is left of segments.

    ``members`` programs for each request and KV head; ``MOST``: a power of two from their number
    on.  ``sums``: partial sums of each, of ``segments`` far segments but for the first; ``SUMS``: a
    power of two from there on.  Writes ``[R, Hkv, SCORED_BLOCKS]`` int32 and
    ``[T, Hq, segments]`` float32.  ``counter_ptr``: zeros at the beginning and at the end.
    """
    KEYS: gl.constexpr = RULE.KEYS
    GROUP: gl.constexpr = SHAPE.GROUP
    NUM_KV_HEADS: gl.constexpr = SHAPE.NUM_KV_HEADS
    QUERY_LEN: gl.constexpr = SHAPE.QUERY_LEN
    COUNT: gl.constexpr = RULE.SCORED_BLOCKS
    SINKS: gl.constexpr = RULE.SINK_BLOCKS // 32
    REACH: gl.constexpr = RULE.REACH_BLOCKS // 32
    NEAR: gl.constexpr = SINKS + (2 if QUERY_LEN > 1 else 1)
    COLUMNS: gl.constexpr = SHAPE.COLUMNS
    SEGMENTS: gl.constexpr = 16 * TURNS
    WIDE: gl.constexpr = min(COLUMNS, 8)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; // $0", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    job = gl.program_id(0) // members
    member = gl.program_id(0) % members
    request = job // NUM_KV_HEADS
    kv_head = job % NUM_KV_HEADS
    seq_len = gl.load(seq_lens_ptr + request)
    first_token = gl.load(cu_seqlens_ptr + request)
    num_tokens = gl.load(cu_seqlens_ptr + request + 1) - first_token
    position = seq_len - num_tokens
    last = gl.maximum(position // 64 - REACH, 0)  # first segment of the window
    full = (position < dense_below) | ((last - gl.minimum(last, SINKS)) * 32 <= COUNT)
    out = out_ptr + request.to(gl.int64) * out_strides[0] + kv_head * out_strides[1]
    if full | (num_tokens <= 0):
        if member == 0:
            offs = gl.arange(0, 1024, layout=FLAT)
            for begin in range(0, COUNT, 1024):
                gl.store(out + begin + offs, offs * 0 - 1, mask=begin + offs < COUNT)
        return
    active = gl.cdiv(last - SINKS, SEGMENTS)
    if member >= active:
        return
    counters = counter_ptr + 2 * job
    # config.first_key: the octave of a share of the cells that are chosen for each row
    share = gl.maximum(COUNT // (num_tokens * GROUP), 1).to(gl.float32)
    first_key = ((254 - (share.to(gl.int32, bitcast=True) >> 23)) << 2) - (KEYS - 1)
    key_counters = counters_of_keys()
    begin = SINKS + member * SEGMENTS

    # A turn is 16 segments, four of each warp; 8 threads have a segment, each every eighth cell.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    SEGMENT: gl.constexpr = gl.SliceLayout(1, ROWS)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    weights = gl.allocate_shared_memory(gl.int32, [TURNS, 16, 8, COLUMNS], PLAIN3)
    shares = gl.allocate_shared_memory(gl.float32, [TURNS, 16, COLUMNS], PLAIN2)
    keys = gl.allocate_shared_memory(gl.int32, [TURNS, 16, 8], PLAIN2)
    spot = job.to(gl.int64) * width + begin
    # every warp has a run of segments: row r of turn t is segment (r / 4 * TURNS + t) * 4 + r % 4
    n = gl.arange(0, SEGMENTS * 2 * COLUMNS, layout=gl.SliceLayout(1, WORDS))  # in 16 bytes
    row = n // (2 * COLUMNS)
    from_segment = (row % 16 // 4 * TURNS + row // 16) * 4 + row % 4
    at = (weights_ptr + spot * (32 * COLUMNS)).to(gl.pointer_type(gl.int32))
    at = at + (from_segment * (8 * COLUMNS) + n % (2 * COLUMNS) * 4)[:, None]
    at = at + gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS))[None, :]
    flat = weights._reinterpret(gl.int32, [SEGMENTS * 2 * COLUMNS, 4], PLAIN2)
    there = (begin + from_segment < last)[:, None] & (
        gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS)) >= 0
    )[None, :]
    async_copy.async_copy_global_to_shared(flat, at, mask=there)
    async_copy.commit_group()

    # Totals of rows: [columns].
    PARTS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    m = gl.arange(0, SUMS, layout=gl.SliceLayout(1, PARTS))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PARTS))
    parts_there = m < NEAR + gl.cdiv(position // 64 - SINKS, segments)
    states = state_ptr + job.to(gl.int64) * sums * (2 * COLUMNS)
    at_state = states + m[:, None] * (2 * COLUMNS) + 2 * c[None, :]
    highest = gl.load(at_state, mask=parts_there[:, None], other=-1.0e30)
    parts = gl.load(at_state + 1, mask=parts_there[:, None], other=0.0)
    total = gl.max(highest, axis=0)
    parts = gl.sum(parts * gl.exp2(highest - total[None, :]), axis=0)
    total += log2(parts) - 1.0  # [columns]
    live = (c < QUERY_LEN * GROUP) & (c // GROUP < num_tokens)
    total = gl.where(live, total, 1.0e30)

    # What a weight counts: [segments, columns].
    SHARE: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [WARPS, 1], [1, 0])
    row = gl.arange(0, SEGMENTS, layout=gl.SliceLayout(1, SHARE))
    from_segment = (row % 16 // 4 * TURNS + row // 16) * 4 + row % 4
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SHARE))
    where = (spot + from_segment)[:, None] * COLUMNS + column[None, :]
    there = (begin + from_segment < last)[:, None] & (column >= 0)[None, :]
    top = gl.load(tops_ptr + where, mask=there, other=-1.0e30)
    share = top + gl.load(gains_ptr + where, mask=there, other=0.0)
    share = gl.exp2(share - gl.convert_layout(total, gl.SliceLayout(0, SHARE))[None, :])
    shares._reinterpret(gl.float32, [SEGMENTS, COLUMNS], PLAIN2).store(share)
    async_copy.wait_group(0)
    thread_barrier()

    # Keys, and how many there are of each.
    every_thread = gl.arange(0, 128, layout=FLAT)
    clear_counters(key_counters + every_thread * 64)
    thread_barrier()
    of_lane = key_counters + (gl.arange(0, 16, layout=SEGMENT) % 4 * 32)[:, None]
    of_lane = of_lane + gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :] * 4
    thread = gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :]
    row = gl.arange(0, 16, layout=SEGMENT)
    first_segment = begin + row // 4 * (4 * TURNS) + row % 4
    for turn in range(TURNS):
        a, b = two_words(weights.index(turn), 0, ROWS)
        left, right = two_shares(shares.index(turn), 0, ROWS)
        s0 = weight_of(a, 0) * left + weight_of(a, 1) * right
        s1 = weight_of(a, 2) * left + weight_of(a, 3) * right
        s2 = weight_of(b, 0) * left + weight_of(b, 1) * right
        s3 = weight_of(b, 2) * left + weight_of(b, 3) * right
        for pair in gl.static_range(1, COLUMNS // 2):
            a, b = two_words(weights.index(turn), pair, ROWS)
            left, right = two_shares(shares.index(turn), pair, ROWS)
            s0 += weight_of(a, 0) * left + weight_of(a, 1) * right
            s1 += weight_of(a, 2) * left + weight_of(a, 3) * right
            s2 += weight_of(b, 0) * left + weight_of(b, 1) * right
            s3 += weight_of(b, 2) * left + weight_of(b, 3) * right
        inside = (first_segment + 4 * turn < last)[:, None] & (thread >= 0)
        k0 = key_of(s0, inside, first_key, KEYS)
        k1 = key_of(s1, inside, first_key, KEYS)
        k2 = key_of(s2, inside, first_key, KEYS)
        k3 = key_of(s3, inside, first_key, KEYS)
        keys.index(turn).store(k0 | (k1 << 8) | (k2 << 16) | (k3 << 24))
        count_key(of_lane, k0)
        count_key(of_lane, k1)
        count_key(of_lane, k2)
        count_key(of_lane, k3)
    thread_barrier()
    # Counters of a key are 32 lanes': two threads of 64 keys add up halves of them.
    HALVES: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, HALVES))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, HALVES))
    mine = key_counters + key[:, None] * 128 + half[None, :] * 64
    counts = count_ptr + job.to(gl.int64) * members * KEYS
    gl.store(counts + member * KEYS + key, gl.sum(read_counters(mine), axis=1))
    arrive(counters)
    wait_for(counters, active)

    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    other = gl.arange(0, MOST, layout=gl.SliceLayout(1, PAIR))
    bins = gl.arange(0, KEYS, layout=gl.SliceLayout(0, PAIR))
    every = gl.load(
        counts + other[:, None] * KEYS + bins[None, :],
        mask=(other < active)[:, None],
        other=0,
        cache_modifier=".cg",
    )
    reach = gl.convert_layout(gl.sum(every, axis=0), FLAT)
    reach = gl.associative_scan(reach, 0, add, reverse=True)
    threshold = gl.sum((reach >= COUNT).to(gl.int32), axis=0) - 1
    needed = COUNT - gl.max(gl.where(reach < COUNT, reach, 0), axis=0)
    earlier = gl.where((other < member)[:, None], every, 0)
    more = gl.where((bins > threshold)[None, :], earlier, 0)
    same = gl.where((bins == threshold)[None, :], earlier, 0)
    more_before = gl.sum(gl.sum(more, axis=1), axis=0)  # in earlier programs
    same_before = gl.sum(gl.sum(same, axis=1), axis=0)

    # How many a warp has, and those before it.
    has = gl.zeros([16, 8], gl.int32, ROWS)
    for turn in range(TURNS):
        word = keys.index(turn).load(ROWS)
        for j in gl.static_range(4):
            k = byte_of(word, j)
            has += gl.where(k > threshold, 1, gl.where(k == threshold, 65536, 0))
    WARP: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, WARPS], [32, 1], [WARPS, 1], [1, 0])
    has = gl.sum(gl.convert_layout(gl.reshape(has, [WARPS, 32]), WARP), axis=1)
    has = gl.convert_layout(has, gl.SliceLayout(0, SQUARE))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, SQUARE))[:, None]
    other_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(0, SQUARE))[None, :]
    before = gl.sum(gl.where(other_warp < warp, has[None, :], 0), axis=1)  # [warps]
    before = gl.convert_layout(before, gl.SliceLayout(1, WARP))[:, None]
    before += gl.zeros([WARPS, 32], gl.int32, WARP)
    before = gl.convert_layout(gl.reshape(before, [16, 8]), ROWS)
    more = more_before + (before & 0xFFFF)
    same = same_before + (before >> 16)

    rows = tail_ptr + first_token.to(gl.int64) * tail_strides[0]
    rows += kv_head * GROUP * tail_strides[1]
    first_bit = 1 << thread
    for turn in range(TURNS):
        word = keys.index(turn).load(ROWS)
        above, equal = masks_of(
            byte_of(word, 0), byte_of(word, 1), byte_of(word, 2), byte_of(word, 3),
            gl.full([16, 8], 0, gl.int32, ROWS) + threshold,
        )  # fmt: skip
        here = bits_of(above) + 65536 * bits_of(equal)  # of a segment
        until = here + shuffle_up(here, 8)
        until += shuffle_up(until, 16)
        sames = same + ((until - here) >> 16)
        place = more + ((until - here) & 0xFFFF) + gl.minimum(sames, needed)
        taken = above | lowest_bits(equal, gl.maximum(needed - sames, 0))
        segment = (first_segment + 4 * turn)[:, None]
        for j in gl.static_range(4):
            bit = first_bit << (8 * j)
            spot_of = out + place + bits_of(taken & (bit - 1))
            gl.store(spot_of, segment * 32 + 8 * j + thread, mask=(taken & bit) != 0)
        until = last_of_warp(until)
        more += until & 0xFFFF
        same += until >> 16
        # What is left of a segment for 4 or 8 columns, of which each thread ends with one.
        f0 = gl.where((taken & first_bit) == 0, 1.0, 0.0)
        f1 = gl.where((taken & (first_bit << 8)) == 0, 1.0, 0.0)
        f2 = gl.where((taken & (first_bit << 16)) == 0, 1.0, 0.0)
        f3 = gl.where((taken & (first_bit << 24)) == 0, 1.0, 0.0)
        keep = (first_segment + 4 * turn < last)[:, None]
        for first in gl.static_range(0, COLUMNS, WIDE):
            x = ()
            for pair in gl.static_range(first // 2, (first + WIDE) // 2):
                a, b = two_words(weights.index(turn), pair, ROWS)
                for h in gl.static_range(2):
                    part = weight_of(a, h) * f0 + weight_of(a, 2 + h) * f1
                    part += weight_of(b, h) * f2 + weight_of(b, 2 + h) * f3
                    x = x + (part,)  # type: ignore[assignment]  # noqa: RUF005
            part = fold(fold(x[0], x[1], thread, 1), fold(x[2], x[3], thread, 1), thread, 2)  # type: ignore[misc]
            if WIDE == 4:
                part = fold(part, part, thread, 4)
            else:
                more_of = fold(fold(x[4], x[5], thread, 1), fold(x[6], x[7], thread, 1), thread, 2)  # type: ignore[misc]
                part = fold(part, more_of, thread, 4)
            of = first + thread % WIDE  # its column
            at_top = tops_ptr + (job.to(gl.int64) * width + segment) * COLUMNS + of
            part = gl.load(at_top, mask=keep, other=0.0) + log2(part) + 1.0
            part = gl.where(taken == -1, float("-inf"), part)
            to_tail = rows + (of // GROUP) * tail_strides[0] + (of % GROUP) * tail_strides[1]
            wanted = keep & (of < QUERY_LEN * GROUP) & (of // GROUP < num_tokens)
            gl.store(to_tail + segment, part, mask=wanted & (thread < WIDE))
    leave(counters, active)

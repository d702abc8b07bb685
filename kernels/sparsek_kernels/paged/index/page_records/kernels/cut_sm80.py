"""Which cells are drawn by their weights (Gluon).

The rule is docs/selection.md.  A *group* of programs serves a request's rows of one KV head.  Of a
segment 8 threads have every eighth cell:

1. Cells have their scores, and these their integer keys.  Programs leave how many cells they have
   of each key.
2. With the counts of the whole group the share of each key is known, and the sum of shares before a
   program's own cells: it writes its part of the list.

Programs start in the order of their numbers, and a group has fewer than run at once: those that
wait wait for programs that run.  Everything that programs exchange is stored by its owner and added
up in one order: results do not depend on timing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier
from sparsek_kernels.paged.index.page_records.kernels.counts_sm80 import (
    add_scores,
    clear_counters,
    count_keys,
    counters_of_keys,
    last_of_warp,
    leave_sum_of_warp,
    list_drawn,
    load_own,
    read_counters,
    shares_of,
    shuffle_up,
    store_own,
    sum_of_warps_before,
    twice,
)
from sparsek_kernels.paged.index.page_records.kernels.lanes_sm80 import shuffle
from sparsek_kernels.paged.index.page_records.kernels.weigh_sm80 import segments_of_program
from sparsek_kernels.paged.sample import SPREAD, STEPS, WHOLE_BITS

WARPS: gl.constexpr = gl.constexpr(4)
OCTAVE: gl.constexpr = gl.constexpr(STEPS)
WHOLE: gl.constexpr = gl.constexpr(WHOLE_BITS)
START: gl.constexpr = gl.constexpr(SPREAD - (1 << 32))
NONE: gl.constexpr = gl.constexpr(-1.0e30)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def load_words(
    weights, segment, turn: gl.constexpr, last, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Weights of a thread's four cells in a turn: two words for each two of the columns.

    weights: ``[16]`` pointers to bytes, where those of each row's first segment begin; segment:
    ``[16]``, these segments; last: the first one that does not compete.
    """
    at = weights[:, None] + (4 * turn * 32 * COLUMNS + gl.zeros([16, 8], gl.int32, ROWS))
    inside = (segment + 4 * turn < last)[:, None] & (gl.zeros([16, 8], gl.int32, ROWS) == 0)
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    thread = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LINE)))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINE)))
    at = gl.convert_layout(at, gl.SliceLayout(2, LINE), assert_trivial=True)
    inside = gl.convert_layout(inside, gl.SliceLayout(2, LINE), assert_trivial=True)
    at = (at + thread[None, :] * (4 * COLUMNS)).to(gl.pointer_type(gl.int32))[:, :, None]
    words = ()
    for first in gl.static_range(0, COLUMNS, 4):
        four = at + (first + word)[None, None, :]
        x = gl.load(
            four,
            mask=inside[:, :, None] & (word >= 0)[None, None, :],
            other=0,
            cache_modifier=".cg",
        )
        even, odd = gl.split(gl.reshape(x, [16, 8, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        a = gl.convert_layout(a, ROWS, assert_trivial=True)
        b = gl.convert_layout(b, ROWS, assert_trivial=True)
        c = gl.convert_layout(c, ROWS, assert_trivial=True)
        d = gl.convert_layout(d, ROWS, assert_trivial=True)
        words = words + (a, b, c, d)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def two_shares(turn, PAIR: gl.constexpr, ROWS: gl.constexpr):
    """What a thread's segment has of two columns, of ``[16, COLUMNS]``: ``[16, 1]`` each."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    x = turn.slice(2 * PAIR, 2, dim=1).load(gl.SliceLayout(1, LINE))
    a, b = gl.split(x[:, None, :] + gl.zeros([16, 8, 2], gl.int32, LINE))
    return (
        gl.convert_layout(a, ROWS, assert_trivial=True),
        gl.convert_layout(b, ROWS, assert_trivial=True),
    )


@gluon.jit
def join_totals(highest, total, lane, OFF: gl.constexpr):
    """Maxima and sums of exps, with those of the thread ``lane ^ OFF``."""
    other, more = shuffle(highest, lane ^ OFF), shuffle(total, lane ^ OFF)
    top = gl.maximum(highest, other)
    return top, total * gl.exp2(highest - top) + more * gl.exp2(other - top)


@gluon.jit
def leave_totals(states_ptr, rows, shared, COLUMNS: gl.constexpr, FLAT: gl.constexpr):
    """Leave each warp's maximum and sum of exps of each column in ``shared``.

    states_ptr: maxima and sums ``[rows, COLUMNS, 2]``; shared: ``[256]``, maxima before
    sums, where warp ``w`` has the places ``32 w`` to ``32 w + COLUMNS``.
    """
    thread = gl.arange(0, 128, layout=FLAT)
    states = states_ptr.to(gl.pointer_type(gl.int64)) + thread
    EACH: gl.constexpr = 128 // COLUMNS
    highest = gl.full([128], NONE, gl.float32, FLAT)
    total = gl.zeros([128], gl.float32, FLAT)
    for begin in range(0, rows, 8 * EACH):
        tops, sums = (), ()
        top = highest
        for i in gl.static_range(8):
            row = begin + i * EACH
            there = row + thread // COLUMNS < rows
            # of none: NONE in the lower half, 0 in the upper one
            both = gl.load(states + row * COLUMNS, mask=there, other=0xF149F2CA)
            tops = tops + (both.to(gl.int32).to(gl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + ((both >> 32).to(gl.int32).to(gl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
            top = gl.maximum(top, tops[i])
        total *= gl.exp2(highest - top)
        for i in gl.static_range(8):
            total += sums[i] * gl.exp2(tops[i] - top)
        highest = top
    lane = thread % 32
    highest, total = join_totals(highest, total, lane, 16)
    if COLUMNS <= 8:
        highest, total = join_totals(highest, total, lane, 8)
    if COLUMNS <= 4:
        highest, total = join_totals(highest, total, lane, 4)
    shared.slice(0, 128).store(highest)
    shared.slice(128, 128).store(total)


@gluon.jit
def add_totals(shared, LANES: gl.constexpr):
    """Log of the sum of exps of each column, ``[32]``: the first ``COLUMNS`` threads have all."""
    highest = gl.full([32], NONE, gl.float32, LANES)
    for warp in gl.static_range(WARPS):
        highest = gl.maximum(highest, shared.slice(32 * warp, 32).load(LANES))
    total = gl.zeros([32], gl.float32, LANES)
    for warp in gl.static_range(WARPS):
        top = shared.slice(32 * warp, 32).load(LANES)
        total += shared.slice(128 + 32 * warp, 32).load(LANES) * gl.exp2(top - highest)
    return highest + log2(total)


@gluon.jit
def arrive(counter_ptr, thread):
    """Tell the group that what this program left for it is there."""
    thread_barrier()
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.eq.s32 p, $2, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }
        """,
        "=&r,l,r", [counter_ptr.to(gl.int64) + 0 * thread.to(gl.int64), thread],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for(counter_ptr, count, thread):
    """Wait until ``count`` programs have arrived."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        WAIT${:uid}:
        ld.acquire.gpu.global.u32 $0, [$1];
        setp.lt.u32 p, $0, $2;
        @p bra WAIT${:uid};
        }
        """,
        "=&r,l,r", [counter_ptr.to(gl.int64) + 0 * thread.to(gl.int64), count + 0 * thread],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def share_of(steps):
    """The probability of cells whose weights have some steps, int32 of ``2 ** WHOLE``."""
    share = gl.exp2(WHOLE - steps.to(gl.float32) / OCTAVE).to(gl.int32)
    return gl.where(steps > 0, share, 1 << WHOLE)


@gluon.jit
def shares_of_keys(
    counts_ptr, active, member, LANES: gl.constexpr, KEYS: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """The steps of key 0's weight, before they are cut off at 0, and the shares of two keys a lane.

    The last numbers: the sum of the shares of earlier programs' cells, and that of all.
    """
    lane = gl.arange(0, 32, layout=LANES)  # two keys each
    pairs = counts_ptr.to(gl.pointer_type(gl.int64)) + lane
    none = gl.zeros([32], gl.int32, LANES)
    t0, t1, e0, e1 = none, none, none, none
    for begin in range(0, active, 16):
        for i in gl.static_range(16):
            row = begin + i
            both = gl.load(
                pairs + row * (KEYS // 2), mask=none + row < active, other=0, cache_modifier=".cg"
            )
            low, high = both.to(gl.int32), (both >> 32).to(gl.int32)
            t0 += low
            t1 += high
            e0 += gl.where(row < member, low, 0)
            e1 += gl.where(row < member, high, 0)
    larger1 = gl.associative_scan(t0 + t1, 0, add, reverse=True) - t0 - t1
    larger0 = larger1 + t1  # cells of larger keys
    size0 = gl.exp2(lane.to(gl.float32) * 0.5)
    size1 = size0 * 1.189207115002721
    m0, m1 = t0.to(gl.float32) * size0, t1.to(gl.float32) * size1
    until1 = gl.associative_scan(m0 + m1, 0, add)
    until0 = gl.where(lane > 0, shuffle(until1, gl.maximum(lane - 1, 0)), 0.0) + m0
    some0 = larger0.to(gl.float32) + until0 / size0 >= COUNT  # not all of this key and above
    some1 = larger1.to(gl.float32) + until1 / size1 >= COUNT
    rest = gl.sum(gl.where(some0, m0, 0.0) + gl.where(some1, m1, 0.0), axis=0)
    certain = gl.sum(gl.where(some0, 0, t0) + gl.where(some1, 0, t1), axis=0)
    threshold = log2(rest / (COUNT - certain).to(gl.float32) + gl.zeros([32], gl.float32, LANES))
    first = gl.ceil(OCTAVE * threshold - 2e-4).to(gl.int32)
    share0 = share_of(gl.maximum(first - 2 * (OCTAVE // 4) * lane, 0))
    share1 = share_of(gl.maximum(first - (2 * lane + 1) * (OCTAVE // 4), 0))
    before = gl.sum(e0 * share0 + e1 * share1, axis=0)
    return gl.max(first, axis=0), share0, share1, before, gl.sum(t0 * share0 + t1 * share1, axis=0)


@gluon.jit(do_not_specialize=["dense_below", "members", "sums", "at_once", "width"])
def cut_cells_kernel(
    out_ptr, count_ptr, counter_ptr, weights_ptr, tops_ptr, gains_ptr, state_ptr,
    seq_lens_ptr, cu_seqlens_ptr,
    dense_below, members, sums, at_once, width, out_strides,
    RULE: gl.constexpr, SHAPE: gl.constexpr, TURNS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Entries of the cells that are drawn for requests, ``[R, Hkv, SCORED_BLOCKS]`` int32.

    ``members`` programs for each request and KV head.  ``sums``: partial sums of each at most, of
    programs that weigh, ``at_once`` of them at once.  ``counter_ptr``: a zero for each request and
    KV head.
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
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    job = gl.program_id(0) // members
    member = gl.program_id(0) % members
    request = job // NUM_KV_HEADS
    kv_head = job % NUM_KV_HEADS
    seq_len = gl.load(seq_lens_ptr + request).to(gl.int32)
    first_token = gl.load(cu_seqlens_ptr + request).to(gl.int32)
    num_tokens = gl.load(cu_seqlens_ptr + request + 1).to(gl.int32) - first_token
    position = seq_len - num_tokens
    far_end = gl.minimum(position // 64, width)  # a row of scratch has no more
    last = gl.maximum(far_end - REACH, 0)  # first segment of the window
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
    if OVERLAP:  # not before: attention that finds nothing chosen is slower where it starts early
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    counter = counter_ptr + job
    # sample.first_key: the octave of a share of the cells that are chosen for each row
    share = gl.maximum(COUNT // (num_tokens * GROUP), 1).to(gl.float32)
    first_key = ((254 - (share.to(gl.int32, bitcast=True) >> 23)) << 2) - (KEYS - 1)
    key_counters = counters_of_keys(TURNS)
    begin = SINKS + member * SEGMENTS

    # A turn is 16 segments, four of each warp; 8 threads have a segment, each every eighth cell.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    SEGMENT: gl.constexpr = gl.SliceLayout(1, ROWS)
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shares = gl.allocate_shared_memory(gl.int32, [TURNS, 16, COLUMNS], PLAIN2)
    spot = job.to(gl.int64) * width + begin
    # every warp has a run of segments: row r of turn t is segment (r / 4 * TURNS + t) * 4 + r % 4
    row = gl.arange(0, 16, layout=SEGMENT)
    from_segment = row // 4 * (4 * TURNS) + row % 4
    first_segment = begin + from_segment
    thread = gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :]
    thread = thread + gl.zeros([16, 8], gl.int32, ROWS)
    weights = weights_ptr + (spot + from_segment) * (32 * COLUMNS)
    AHEAD: gl.constexpr = min(64 // COLUMNS, TURNS)  # turns whose weights are in registers
    words = ()
    for turn in gl.static_range(AHEAD):
        words = words + load_words(weights, first_segment, turn, last, ROWS, COLUMNS)

    # What a weight counts: [segments, columns].
    SHARE: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [WARPS, 1], [1, 0])
    row = gl.arange(0, SEGMENTS, layout=gl.SliceLayout(1, SHARE))
    from_segment = (row % 16 // 4 * TURNS + row // 16) * 4 + row % 4
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SHARE))
    where = (spot + from_segment)[:, None] * COLUMNS + column[None, :]
    there = (begin + from_segment < last)[:, None] & (column >= 0)[None, :]
    top = gl.load(tops_ptr + where, mask=there, other=-1.0e30)
    share = top + gl.load(gains_ptr + where, mask=there, other=0.0)
    every_thread = gl.arange(0, 128, layout=FLAT)
    clear_counters(key_counters + every_thread * 64)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PLAIN1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_warps = gl.allocate_shared_memory(gl.float32, [256], PLAIN1)
    totals = gl.allocate_shared_memory(gl.float32, [32], PLAIN1)
    states = state_ptr + job.to(gl.int64) * sums * (2 * COLUMNS)
    far = far_end - SINKS
    parts = NEAR + gl.cdiv(far, segments_of_program(far, sums - NEAR, at_once))
    leave_totals(states, parts, of_warps, COLUMNS, FLAT)
    thread_barrier()
    totals.store(add_totals(of_warps, LANES) - 1.0)  # a cell has two keys
    thread_barrier()

    total = totals.slice(0, COLUMNS).load(gl.SliceLayout(0, SHARE))
    live = (column < QUERY_LEN * GROUP) & (column // GROUP < num_tokens)
    share = gl.where(live[None, :], gl.exp2(share - total[None, :]), 0.0)
    reinterpret(shares, gl.int32, [SEGMENTS, COLUMNS], PLAIN2).store(twice(share))
    thread_barrier()

    # Keys, and how many there are of each.
    of_lane = key_counters + (gl.arange(0, 16, layout=SEGMENT) % 4 * 32)[:, None]
    of_lane = of_lane + thread * 4
    row = gl.arange(0, 16, layout=SEGMENT)
    own_words = key_counters + 4 * 2080 + row[:, None] * 32 + thread * 4
    lowest = (first_key << 5) * 0x00010001
    highest = ((first_key + KEYS - 1) << 5) * 0x00010001 + 0x001F001F
    for turn in gl.static_range(TURNS):
        if turn > 0 and turn + AHEAD <= TURNS:
            words = words + load_words(
                weights, first_segment, turn + AHEAD - 1, last, ROWS, COLUMNS
            )
        s0, s1 = gl.zeros([16, 8], gl.int32, ROWS), gl.zeros([16, 8], gl.int32, ROWS)
        for pair in gl.static_range(COLUMNS // 2):
            a = words[turn * COLUMNS + 2 * pair]  # type: ignore[var-annotated]
            b = words[turn * COLUMNS + 2 * pair + 1]  # type: ignore[var-annotated]
            left, right = two_shares(shares.index(turn), pair, ROWS)
            s0, s1 = add_scores(s0, s1, a, b, left, right)
        inside = (first_segment + 4 * turn < last)[:, None] & (thread >= 0)
        word = count_keys(
            s0, s1, thread * 0 + lowest, thread * 0 + highest, inside.to(gl.int32), of_lane
        )
        store_own(own_words + 512 * turn, word)
    thread_barrier()
    # Counters of a key are 32 lanes': two threads of 64 keys add up halves of them.
    HALVES: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, HALVES))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, HALVES))
    mine = key_counters + key[:, None] * 128 + half[None, :] * 64
    counts = count_ptr + job.to(gl.int64) * members * KEYS
    gl.store(counts + member * KEYS + key, gl.sum(read_counters(mine), axis=1))
    arrive(counter, every_thread)
    wait_for(counter, active, every_thread)
    first, share0, share1, before, all_shares = shares_of_keys(
        counts, active, member, LANES, KEYS, COUNT
    )
    start = (position * START >> (32 - WHOLE)) & ((1 << WHOLE) - 1)

    # The counters' place is free: shares by the bytes of keys, which have 64 more; 0 outside.
    lane = gl.arange(0, 32, layout=LANES)
    store_own(key_counters + 4 * lane, lane * 0)
    store_own(key_counters + 4 * (64 + 2 * lane), share0)
    store_own(key_counters + 4 * (65 + 2 * lane), share1)
    thread_barrier()
    total = gl.zeros([16, 8], gl.int32, ROWS)
    for turn in range(TURNS):
        p0, p1, p2, p3 = shares_of(load_own(own_words + 512 * turn), key_counters + 0 * thread)
        total += p0 + p1 + p2 + p3
    leave_sum_of_warp(key_counters + 4 * 128 + 0 * thread, total)
    thread_barrier()
    sum_before = before + start + sum_of_warps_before(key_counters + 4 * 128 + 0 * thread)
    list_at = out.to(gl.int64) + 0 * thread.to(gl.int64)
    for turn in range(TURNS):
        word = load_own(own_words + 512 * turn)
        p0, p1, p2, p3 = shares_of(word, key_counters + 0 * thread)
        here = p0 + p1 + p2 + p3
        until = here + shuffle_up(here, 1)
        until += shuffle_up(until, 2)
        until += shuffle_up(until, 4)
        until += shuffle_up(until, 8)
        until += shuffle_up(until, 16)
        cell = (first_segment + 4 * turn)[:, None] * 32 + thread
        list_drawn(
            list_at, sum_before + until - here, p0, p1, p2, p3, word, cell,
            thread * 0 + (first + 64 * (OCTAVE // 4)), thread * 0 + COUNT,
        )  # fmt: skip
        sum_before += last_of_warp(until)
    if member == 0:
        filled = (start + all_shares) >> WHOLE & ((1 << (32 - WHOLE)) - 1)  # sums are unsigned
        for place in range(filled, COUNT, 128):
            gl.store(
                out + place + every_thread, every_thread * 0 - 1, mask=place + every_thread < COUNT
            )

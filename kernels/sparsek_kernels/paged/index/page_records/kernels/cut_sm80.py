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
    add_scores,
    bits_of,
    bits_of_segment,
    clear_counters,
    count_keys,
    counters_of_keys,
    flags_of,
    fold,
    last_of_warp,
    leave_sum_of_warp,
    left_of,
    list_bits,
    load_own,
    lowest_bits,
    ones_where_not,
    read_counters,
    shuffle_up,
    store_own,
    sum_of_bytes,
    sum_of_halves,
    sum_of_warps_before,
    twice,
)
from sparsek_kernels.paged.index.page_records.kernels.lanes_sm80 import shuffle
from sparsek_kernels.paged.index.page_records.kernels.weigh_sm80 import segments_of_program

WARPS: gl.constexpr = gl.constexpr(4)
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
def totals_of(states_ptr, rows, COLUMNS: gl.constexpr, LANES: gl.constexpr):
    """Log of the sum of exps of each column, ``[32]``: every ``COLUMNS`` threads have all.

    states_ptr: maxima and sums ``[rows, COLUMNS, 2]``.
    """
    lane = gl.arange(0, 32, layout=LANES)
    states = states_ptr.to(gl.pointer_type(gl.int64)) + lane
    EACH: gl.constexpr = 32 // COLUMNS
    highest = gl.full([32], NONE, gl.float32, LANES)
    total = gl.zeros([32], gl.float32, LANES)
    for begin in range(0, rows, 8 * EACH):
        tops, sums = (), ()
        top = highest
        for i in gl.static_range(8):
            row = begin + i * EACH
            there = row + lane // COLUMNS < rows
            # of none: NONE in the lower half, 0 in the upper one
            both = gl.load(states + row * COLUMNS, mask=there, other=0xF149F2CA)
            tops = tops + (both.to(gl.int32).to(gl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + ((both >> 32).to(gl.int32).to(gl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
            top = gl.maximum(top, tops[i])
        total *= gl.exp2(highest - top)
        for i in gl.static_range(8):
            total += sums[i] * gl.exp2(tops[i] - top)
        highest = top
    highest, total = join_totals(highest, total, lane, 16)
    if COLUMNS <= 8:
        highest, total = join_totals(highest, total, lane, 8)
    if COLUMNS <= 4:
        highest, total = join_totals(highest, total, lane, 4)
    return highest + log2(total)


@gluon.jit
def load_tops(at, segment, last, thread, COLUMNS: gl.constexpr):
    """What a weight of 1 is of a thread's segment, for each column that it ends with."""
    WIDE: gl.constexpr = min(COLUMNS, 8)
    inside = (segment < last) & (thread < WIDE)
    tops = ()
    for first in gl.static_range(0, COLUMNS, WIDE):
        here = at + segment * COLUMNS + first + thread % WIDE
        tops = tops + (gl.load(here, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return tops


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
def cut_of(
    counts_ptr, active, member, LANES: gl.constexpr, KEYS: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """The smallest key that is chosen, how many cells of it, and what comes before a program.

    The last numbers: cells of larger keys in earlier programs, cells of this key there, and here.
    """
    lane = gl.arange(0, 32, layout=LANES)  # two keys each
    pairs = counts_ptr.to(gl.pointer_type(gl.int64)) + lane
    none = gl.zeros([32], gl.int32, LANES)
    t0, t1, e0, e1, own0, own1 = none, none, none, none, none, none
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
            own0 += gl.where(row == member, low, 0)
            own1 += gl.where(row == member, high, 0)
    reach0 = gl.associative_scan(t0 + t1, 0, add, reverse=True)  # cells of this key and above
    reach1 = reach0 - t0
    enough = (reach0 >= COUNT).to(gl.int32) + (reach1 >= COUNT).to(gl.int32)
    threshold = gl.sum(enough, axis=0) - 1
    above = gl.maximum(gl.where(reach0 < COUNT, reach0, 0), gl.where(reach1 < COUNT, reach1, 0))
    needed = COUNT - gl.max(above, axis=0)
    more = gl.where(2 * lane > threshold, e0, 0) + gl.where(2 * lane + 1 > threshold, e1, 0)
    is0, is1 = 2 * lane == threshold, 2 * lane + 1 == threshold
    same = gl.where(is0, e0, 0) + gl.where(is1, e1, 0)
    here = gl.where(is0, own0, 0) + gl.where(is1, own1, 0)
    return threshold, needed, gl.sum(more, axis=0), gl.sum(same, axis=0), gl.sum(here, axis=0)


@gluon.jit(do_not_specialize=["dense_below", "members", "sums", "segments", "width"])
def cut_cells_kernel(
    out_ptr, tail_ptr, count_ptr, counter_ptr, weights_ptr, tops_ptr, gains_ptr, state_ptr,
    seq_lens_ptr, cu_seqlens_ptr,
    dense_below, members, sums, segments, width, out_strides, tail_strides,
    RULE: gl.constexpr, SHAPE: gl.constexpr, TURNS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The chosen cells of requests, ascending, and the logits of what is left of segments.

    ``members`` programs for each request and KV head.  ``sums``: partial sums of each at most, of
    ``segments`` far segments or more but for the first.  Writes ``[R, Hkv, SCORED_BLOCKS]`` int32,
    and ``[T, Hq, segments]`` float32.  ``counter_ptr``: a zero for each request and KV head.
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
    counter = counter_ptr + job
    # config.first_key: the octave of a share of the cells that are chosen for each row
    share = gl.maximum(COUNT // (num_tokens * GROUP), 1).to(gl.float32)
    first_key = ((254 - (share.to(gl.int32, bitcast=True) >> 23)) << 2) - (KEYS - 1)
    key_counters = counters_of_keys(TURNS)
    begin = SINKS + member * SEGMENTS

    # A turn is 16 segments, four of each warp; 8 threads have a segment, each every eighth cell.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    SEGMENT: gl.constexpr = gl.SliceLayout(1, ROWS)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    weights = gl.allocate_shared_memory(gl.int32, [TURNS, 16, 8, COLUMNS], PLAIN3)
    shares = gl.allocate_shared_memory(gl.int32, [TURNS, 16, COLUMNS], PLAIN2)
    spot = job.to(gl.int64) * width + begin
    # every warp has a run of segments: row r of turn t is segment (r / 4 * TURNS + t) * 4 + r % 4
    GRID: gl.constexpr = gl.BlockedLayout([TURNS, 1], [1, 32], [1, WARPS], [1, 0])
    n = gl.arange(0, 32 * COLUMNS, layout=gl.SliceLayout(0, GRID))  # of a turn, in 16 bytes
    row = n // (2 * COLUMNS)
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, GRID))[:, None]
    from_segment = (row // 4 * (4 * TURNS) + row % 4)[None, :]
    at = from_segment * (2 * COLUMNS) + (n % (2 * COLUMNS))[None, :] + turn * (8 * COLUMNS)
    at = gl.reshape(at, [SEGMENTS * 2 * COLUMNS])
    there = gl.reshape(begin + from_segment + 4 * turn < last, [SEGMENTS * 2 * COLUMNS])
    at = gl.convert_layout(at, gl.SliceLayout(1, WORDS), assert_trivial=True)
    at = weights_ptr + spot * (32 * COLUMNS) + 16 * at
    at = at.to(gl.pointer_type(gl.int32))[:, None]
    there = gl.convert_layout(there, gl.SliceLayout(1, WORDS), assert_trivial=True)[:, None]
    fourth = gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS))[None, :]
    flat = weights._reinterpret(gl.int32, [SEGMENTS * 2 * COLUMNS, 4], PLAIN2)
    async_copy.async_copy_global_to_shared(flat, at + fourth, mask=there & (fourth >= 0))
    async_copy.commit_group()

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
    totals = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    states = state_ptr + job.to(gl.int64) * sums * (2 * COLUMNS)
    far = far_end - SINKS
    parts = NEAR + gl.cdiv(far, segments_of_program(far, sums - NEAR, segments))
    totals.store(totals_of(states, parts, COLUMNS, LANES) - 1.0)  # a cell has two keys
    thread_barrier()

    total = totals.slice(0, COLUMNS).load(gl.SliceLayout(0, SHARE))
    live = (column < QUERY_LEN * GROUP) & (column // GROUP < num_tokens)
    share = gl.where(live[None, :], gl.exp2(share - total[None, :]), 0.0)
    shares._reinterpret(gl.int32, [SEGMENTS, COLUMNS], PLAIN2).store(twice(share))
    async_copy.wait_group(0)
    thread_barrier()

    # Keys, and how many there are of each.
    of_lane = key_counters + (gl.arange(0, 16, layout=SEGMENT) % 4 * 32)[:, None]
    of_lane = of_lane + gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :] * 4
    thread = gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :]
    row = gl.arange(0, 16, layout=SEGMENT)
    first_segment = begin + row // 4 * (4 * TURNS) + row % 4
    thread = thread + gl.zeros([16, 8], gl.int32, ROWS)
    own_words = key_counters + 4 * 2080 + row[:, None] * 32 + thread * 4
    lowest = (first_key << 5) * 0x00010001
    highest = ((first_key + KEYS - 1) << 5) * 0x00010001 + 0x001F001F
    for turn in range(TURNS):
        s0, s1 = gl.zeros([16, 8], gl.int32, ROWS), gl.zeros([16, 8], gl.int32, ROWS)
        for pair in gl.static_range(COLUMNS // 2):
            a, b = two_words(weights.index(turn), pair, ROWS)
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
    at_tops = tops_ptr + job.to(gl.int64) * width * COLUMNS
    tops = load_tops(at_tops, first_segment[:, None], last, thread, COLUMNS)
    arrive(counter, every_thread)
    wait_for(counter, active, every_thread)
    threshold, needed, more_before, same_before, same_here = cut_of(
        counts, active, member, LANES, KEYS, COUNT
    )

    # Of the cells of the smallest key some programs choose all, some none, and one the first ones.
    room = needed - same_before
    least = gl.where(room > 0, threshold, threshold + 1)
    if (room > 0) & (room < same_here):
        count = gl.zeros([16, 8], gl.int32, ROWS)
        for turn in range(TURNS):
            word = load_own(own_words + 512 * turn)
            count += flags_of(word, threshold) - flags_of(word, threshold + 1)
        leave_sum_of_warp(key_counters + 0 * thread, sum_of_bytes(count))
        thread_barrier()
        left_over = room - sum_of_warps_before(key_counters + 0 * thread)
        for turn in range(TURNS):
            word = load_own(own_words + 512 * turn)
            equal = flags_of(word, threshold) - flags_of(word, threshold + 1)
            bits = bits_of_segment(equal, thread)
            here = bits_of(bits)
            until = here + shuffle_up(here, 8)
            until += shuffle_up(until, 16)
            chosen = lowest_bits(bits, gl.maximum(left_over - (until - here), 0))
            word -= ((bits ^ chosen) >> thread) & 0x01010101
            store_own(own_words + 512 * turn, word)
            left_over -= last_of_warp(until)
    count = gl.zeros([16, 8], gl.int32, ROWS)
    for turn in range(TURNS):
        count += flags_of(load_own(own_words + 512 * turn), least)
    leave_sum_of_warp(key_counters + 16 + 0 * thread, sum_of_bytes(count))
    thread_barrier()
    place = sum_of_warps_before(key_counters + 16 + 0 * thread)
    place += more_before + gl.minimum(same_before, needed)

    rows = tail_ptr + first_token.to(gl.int64) * tail_strides[0]
    rows += kv_head * GROUP * tail_strides[1]
    list_at = out.to(gl.int64) + 0 * thread.to(gl.int64)
    bit0, bit1, bit2 = thread & 1, thread & 2, thread & 4
    for turn in range(TURNS):
        segment = (first_segment + 4 * turn)[:, None]
        keep = segment < last
        coming = load_tops(at_tops, segment + 4, last, thread, COLUMNS)
        flags = flags_of(load_own(own_words + 512 * turn), least)
        taken = bits_of_segment(flags, thread)
        here = bits_of(taken)
        until = here + shuffle_up(here, 8)
        until += shuffle_up(until, 16)
        list_bits(list_at, place + until - here, taken, thread, segment * 32 + 0 * thread)
        place += last_of_warp(until)
        # What is left of a segment for 4 or 8 columns, of which each thread ends with one.
        f0, f1 = ones_where_not(flags)
        for first in gl.static_range(0, COLUMNS, WIDE):
            x = ()
            for pair in gl.static_range(first // 2, (first + WIDE) // 2):
                a, b = two_words(weights.index(turn), pair, ROWS)
                x = x + left_of(a, b, f0, f1)
            part = fold(fold(x[0], x[1], bit0, 1), fold(x[2], x[3], bit0, 1), bit1, 2)  # type: ignore[misc]
            if WIDE == 4:
                part = fold(part, part, bit2, 4)
            else:
                high = fold(fold(x[4], x[5], bit0, 1), fold(x[6], x[7], bit0, 1), bit1, 2)  # type: ignore[misc]
                part = fold(part, high, bit2, 4)
            of = first + thread % WIDE  # its column
            left = tops[first // WIDE] + log2(sum_of_halves(part)) + 1.0
            left = gl.where(taken == -1, float("-inf"), left)
            to_tail = rows + (of // GROUP) * tail_strides[0] + (of % GROUP) * tail_strides[1]
            wanted = keep & (of < QUERY_LEN * GROUP) & (of // GROUP < num_tokens)
            gl.store(to_tail + segment, left, mask=wanted & (thread < WIDE))
        tops = coming

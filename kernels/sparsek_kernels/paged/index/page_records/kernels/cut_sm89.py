"""Which cells are chosen by their weights, and what is left of segments (Gluon).

The rule is docs/selection.md.  A *group* of programs serves a request's rows of one KV head, each of
them 128 segments; 8 threads have a segment, each every eighth of its cells:

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
def count_keys(key):
    """How many of a warp's threads have the keys ``lane`` and ``lane + 32``, for each row."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 b, n, m, w, lane;
        mov.u32 lane, %laneid;
        setp.ge.s32 p, $2, 0;
        vote.sync.ballot.b32 m, p, 0xffffffff;
        bfe.s32 n, lane, 0, 1;
        and.b32 w, $2, 1;
        setp.ne.b32 p, w, 0;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        lop3.b32 m, b, n, m, 0x82;
        bfe.s32 n, lane, 1, 1;
        and.b32 w, $2, 2;
        setp.ne.b32 p, w, 0;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        lop3.b32 m, b, n, m, 0x82;
        bfe.s32 n, lane, 2, 1;
        and.b32 w, $2, 4;
        setp.ne.b32 p, w, 0;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        lop3.b32 m, b, n, m, 0x82;
        bfe.s32 n, lane, 3, 1;
        and.b32 w, $2, 8;
        setp.ne.b32 p, w, 0;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        lop3.b32 m, b, n, m, 0x82;
        bfe.s32 n, lane, 4, 1;
        and.b32 w, $2, 16;
        setp.ne.b32 p, w, 0;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        lop3.b32 m, b, n, m, 0x82;
        and.b32 w, $2, 32;
        setp.ne.b32 p, w, 0;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        and.b32 w, m, b;
        popc.b32 $1, w;
        lop3.b32 w, m, b, 0, 0x30;
        popc.b32 $0, w;
        }
        """,
        "=&r,=&r,r",
        [key],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


def _ballots(compare: str, mask: str, before: str, total: str) -> str:
    """Of one comparison of four cells: the segment's bits, and counts before it and in all."""
    votes = "".join(
        f"setp.{compare}.s32 p, ${4 + j}, $8; vote.sync.ballot.b32 b{j}, p, 0xffffffff;\n"
        for j in range(4)
    )
    counts = "".join(
        f"popc.b32 c, b{j}; add.u32 {total}, {total}, c;\n"
        f"and.b32 c, b{j}, low; popc.b32 c, c; add.u32 {before}, {before}, c;\n"
        f"shr.u32 b{j}, b{j}, s;\n"
        for j in range(4)
    )
    return f"""{votes}
        mov.u32 {total}, 0; mov.u32 {before}, 0;
        {counts}
        prmt.b32 b0, b0, b1, 0x0040;
        prmt.b32 b2, b2, b3, 0x0040;
        prmt.b32 {mask}, b0, b2, 0x5410;
        """


_MASKS: gl.constexpr = gl.constexpr(
    """
    {
    .reg .pred p;
    .reg .b32 b0, b1, b2, b3, c, s, low, x, y, z, w;
    mov.u32 s, %laneid;
    and.b32 s, s, 24;
    bfi.b32 low, -1, 0, 0, s;
    """
    + _ballots("gt", "$0", "x", "y")
    + _ballots("eq", "$1", "z", "w")
    + "mad.lo.u32 $2, z, 65536, x; mad.lo.u32 $3, w, 65536, y; }"
)


@gluon.jit
def masks_of(k0, k1, k2, k3, threshold):
    """Of keys of a warp's four segments, those above a threshold and those equal to it.

    Returns a bit for each cell of a thread's segment, of both kinds, and how many there are in the
    segments before it, and in all of the four: above, and 65536 times equal.
    """
    return gl.inline_asm_elementwise(
        _MASKS, "=&r,=&r,=&r,=&r,r,r,r,r,r", [k0, k1, k2, k3, threshold],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def bits_of(x):
    """How many bits of a word are set."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def weight_of(word, AT: gl.constexpr):
    """Byte ``AT`` of words as a float32 weight."""
    if AT == 3:
        bits = word >> 4
    elif AT == 2:
        bits = word << 4
    elif AT == 1:
        bits = word << 12
    else:
        bits = word << 20
    return ((bits & 0x0FF00000) | 0x30000000).to(gl.float32, bitcast=True)


@gluon.jit
def byte_of(word, AT: gl.constexpr):
    """Byte ``AT`` of words, a number of 8 bits with a sign."""
    return (word << (24 - 8 * AT)) >> 24


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
    NEAR: gl.constexpr = SINKS + REACH + (2 if QUERY_LEN > 1 else 1)
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
    begin = SINKS + member * SEGMENTS

    # A turn is 16 segments, four of each warp; 8 threads have a segment, each every eighth cell.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    SEGMENT: gl.constexpr = gl.SliceLayout(1, ROWS)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    weights = gl.allocate_shared_memory(gl.int32, [TURNS, 16, 8, COLUMNS], PLAIN3)
    tops = gl.allocate_shared_memory(gl.float32, [TURNS, 16, COLUMNS], PLAIN2)
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
    there = (begin + from_segment < last)[:, None] & (gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS)) >= 0)[None, :]
    async_copy.async_copy_global_to_shared(flat, at, mask=there)
    async_copy.commit_group()

    # Totals of rows: [columns].
    PARTS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    m = gl.arange(0, SUMS, layout=gl.SliceLayout(1, PARTS))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PARTS))
    parts_there = m < NEAR + gl.cdiv(last - SINKS, segments)
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
    at_top = (spot + from_segment)[:, None] * COLUMNS + column[None, :]
    there = (begin + from_segment < last)[:, None] & (column >= 0)[None, :]
    top = gl.load(tops_ptr + at_top, mask=there, other=-1.0e30)
    share = top + gl.load(gains_ptr + at_top, mask=there, other=0.0)
    share = gl.exp2(share - gl.convert_layout(total, gl.SliceLayout(0, SHARE))[None, :])
    tops._reinterpret(gl.float32, [SEGMENTS, COLUMNS], PLAIN2).store(top)
    shares._reinterpret(gl.float32, [SEGMENTS, COLUMNS], PLAIN2).store(share)
    async_copy.wait_group(0)
    thread_barrier()

    # Keys, and how many there are of each.
    thread = gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :]
    row = gl.arange(0, 16, layout=SEGMENT)
    first_segment = begin + row // 4 * (4 * TURNS) + row % 4
    low = gl.zeros([16, 8], gl.int32, ROWS)
    high = gl.zeros([16, 8], gl.int32, ROWS)
    for turn in range(TURNS):
        s0 = gl.zeros([16, 8], gl.float32, ROWS)
        s1 = s0
        s2 = s0
        s3 = s0
        for pair in gl.static_range(COLUMNS // 2):
            a, b = two_words(weights.index(turn), pair, ROWS)
            left, right = two_shares(shares.index(turn), pair, ROWS)
            s0 += weight_of(a, 0) * left + weight_of(a, 1) * right
            s1 += weight_of(a, 2) * left + weight_of(a, 3) * right
            s2 += weight_of(b, 0) * left + weight_of(b, 1) * right
            s3 += weight_of(b, 2) * left + weight_of(b, 3) * right
        inside = (first_segment + 4 * turn < last)[:, None] & (thread >= 0)
        k0 = key_of(s0, inside, RULE.FIRST_KEY, KEYS)
        k1 = key_of(s1, inside, RULE.FIRST_KEY, KEYS)
        k2 = key_of(s2, inside, RULE.FIRST_KEY, KEYS)
        k3 = key_of(s3, inside, RULE.FIRST_KEY, KEYS)
        word = (k0 & 255) | ((k1 & 255) << 8) | ((k2 & 255) << 16) | (k3 << 24)
        keys.index(turn).store(word)
        for j in gl.static_range(4):
            l, h = count_keys(byte_of(word, j))
            low += l
            high += h
    WARP: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    low = gl.convert_layout(gl.reshape(low, [WARPS, 32]), WARP)
    high = gl.convert_layout(gl.reshape(high, [WARPS, 32]), WARP)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, WARP))
    counts = count_ptr + job.to(gl.int64) * members * KEYS
    gl.store(counts + member * KEYS + lane, gl.sum(low, axis=0))
    gl.store(counts + member * KEYS + 32 + lane, gl.sum(high, axis=0))
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
    mine = gl.where(lane > threshold, 1, gl.where(lane == threshold, 65536, 0))[None, :] * low
    mine += gl.where(lane + 32 > threshold, 1, gl.where(lane + 32 == threshold, 65536, 0))[None, :] * high
    SQUARE: gl.constexpr = gl.BlockedLayout([1, WARPS], [32, 1], [WARPS, 1], [1, 0])
    mine = gl.convert_layout(gl.sum(mine, axis=1), gl.SliceLayout(0, SQUARE))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, SQUARE))[:, None]
    other_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(0, SQUARE))[None, :]
    before = gl.sum(gl.where(other_warp < warp, mine[None, :], 0), axis=1)  # [warps]
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
        above, equal, here, all_four = masks_of(
            byte_of(word, 0), byte_of(word, 1), byte_of(word, 2), byte_of(word, 3),
            gl.full([16, 8], 0, gl.int32, ROWS) + threshold,
        )  # fmt: skip
        segment = (first_segment + 4 * turn)[:, None] + 0 * thread
        mores = more + (here & 0xFFFF)
        sames = same + (here >> 16)
        taken = gl.zeros([16, 8], gl.int32, ROWS)
        for j in gl.static_range(4):
            bit = first_bit << (8 * j)
            tie = sames + bits_of(equal & (bit - 1))
            place = mores + bits_of(above & (bit - 1)) + gl.minimum(tie, needed)
            chosen = ((above & bit) != 0) | (((equal & bit) != 0) & (tie < needed))
            gl.store(out + place, segment * 32 + 8 * j + thread, mask=chosen)
            taken = taken | gl.where(chosen, 1 << j, 0)
        more += all_four & 0xFFFF
        same += all_four >> 16
        some = gl.max(gl.where(taken == 15, 0, 1), axis=1) > 0  # [16]: some cells are left
        keep = first_segment + 4 * turn < last
        for pair in gl.static_range(COLUMNS // 2):
            a, b = two_words(weights.index(turn), pair, ROWS)
            left, right = two_shares(tops.index(turn), pair, ROWS)
            for h in gl.static_range(2):
                if 2 * pair + h < QUERY_LEN * GROUP:
                    x = gl.where((taken & 1) == 0, weight_of(a, h), 0.0)
                    x += gl.where((taken & 2) == 0, weight_of(a, 2 + h), 0.0)
                    x += gl.where((taken & 4) == 0, weight_of(b, h), 0.0)
                    x += gl.where((taken & 8) == 0, weight_of(b, 2 + h), 0.0)
                    x = gl.max(left if h == 0 else right, axis=1) + log2(gl.sum(x, axis=1)) + 1.0
                    x = gl.where(some, x, float("-inf"))
                    to_tail = rows + ((2 * pair + h) // GROUP) * tail_strides[0]
                    to_tail += ((2 * pair + h) % GROUP) * tail_strides[1]
                    here_too = keep & ((2 * pair + h) // GROUP < num_tokens)
                    gl.store(to_tail + first_segment + 4 * turn, x, mask=here_too)
    leave(counters, active)


@gluon.jit
def key_of(score, inside, FIRST_KEY: gl.constexpr, KEYS: gl.constexpr):
    """Integer keys of scores; -1 outside."""
    score = gl.where(score > 0.0, score, 0.0)
    key = (score.to(gl.int32, bitcast=True) >> 21) - FIRST_KEY
    return gl.where(inside, gl.minimum(gl.maximum(key, 0), KEYS - 1), -1)

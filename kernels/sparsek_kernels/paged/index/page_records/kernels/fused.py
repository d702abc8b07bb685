"""Choosing cells for decoded tokens in one launch, by NVIDIA's matrix units (Gluon).

The rule is docs/selection.md; ``scores.py`` and ``choose.py`` have it for every processor, in four
launches.  Here a *group* of programs serves one token and KV head.  Each keeps the logits of the
cells of 64 segments on the chip while the group agrees on what does not fit into one program:

1. A program reads its records and leaves the log of the sum of its cells' exps, for each head; a
   few read the near keys instead.
2. With all of these sums, cells have their probabilities, and these their integer keys.  Programs
   leave how many cells they have of each key.
3. Now the smallest key that is chosen is known, and how many cells are chosen before a program's
   own: it writes its part of the list, and what is left of its segments.

Programs start in the order of their numbers, and a group has fewer than run at once: those that
wait wait for programs that run.  Everything that programs exchange is stored by its owner and added
up in one order: results do not depend on timing.

Reading bounds the kernel: 1.5 KiB for 64 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek_kernels.common.kernels.barrier_sm90 import thread_barrier
from sparsek_kernels.paged.index.page_records.kernels.fused_logits import (
    CELLS,
    NEAR_TURNS,
    SEGMENTS,
    WARPS,
    ask_for,
    near_sums,
    record_logits,
)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def count_keys(key):
    """How many of a warp's row have the keys ``lane`` and ``lane + 32``, for each row."""
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


@gluon.jit
def ranks(key, threshold):
    """A warp's keys above the threshold, and 65536 times those equal: all, and before each."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 a, b, c, mask;
        mov.u32 mask, %lanemask_lt;
        setp.gt.s32 p, $2, $3;
        vote.sync.ballot.b32 a, p, 0xffffffff;
        setp.eq.s32 p, $2, $3;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        popc.b32 c, a;
        popc.b32 $0, b;
        mad.lo.u32 $0, $0, 65536, c;
        and.b32 a, a, mask;
        and.b32 b, b, mask;
        popc.b32 a, a;
        popc.b32 b, b;
        mad.lo.u32 $1, b, 65536, a;
        }
        """,
        "=&r,=&r,r,r",
        [key, threshold],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
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
    if gl.atomic_add(counters + 3, 1, sem="acq_rel") == active - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
        gl.store(counters + 2, 0)
        gl.store(counters + 3, 0)


@gluon.jit(do_not_specialize=["dense_below", "members"])
def choose_cells_kernel(
    out_ptr,
    tail_ptr,
    state_ptr,
    count_ptr,
    counter_ptr,
    q_ptr,
    k_ptr,
    records_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    dense_below,
    members,
    q_strides,
    k_strides,
    record_strides,
    out_strides,
    tail_strides,
    stride_br,
    RULE: gl.constexpr,
    SHAPE: gl.constexpr,
    MOST: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """The chosen cells of single tokens, ascending, and the logits of what is left of segments.

    ``members`` programs for each token and KV head; ``MOST``: a power of two from their number on.
    Writes ``[T, Hkv, SCORED_BLOCKS]`` int32 and ``[T, Hq, segments]`` float32.  ``counter_ptr``:
    zeros at the beginning and at the end.
    """
    KEYS: gl.constexpr = RULE.KEYS
    GROUP: gl.constexpr = SHAPE.GROUP
    NUM_KV_HEADS: gl.constexpr = SHAPE.NUM_KV_HEADS
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    PAGE: gl.constexpr = SHAPE.PAGE_SIZE
    RECORD: gl.constexpr = SHAPE.RECORD
    QUERY_LEN: gl.constexpr = SHAPE.QUERY_LEN
    COUNT: gl.constexpr = RULE.SCORED_BLOCKS
    SINKS: gl.constexpr = RULE.SINK_BLOCKS // CELLS
    REACH: gl.constexpr = RULE.REACH_BLOCKS // CELLS
    NEAR: gl.constexpr = (SINKS + REACH + NEAR_TURNS) // NEAR_TURNS
    N: gl.constexpr = SHAPE.COLUMNS
    HEADS: gl.constexpr = SHAPE.HEADS  # a power of two, at most N
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    group = gl.program_id(0) // members
    member = gl.program_id(0) % members
    tile = group // NUM_KV_HEADS
    kv_head = group % NUM_KV_HEADS
    request = tile // QUERY_LEN
    token = tile % QUERY_LEN
    seq_len = gl.load(seq_lens_ptr + request)
    first_token = gl.load(cu_seqlens_ptr + request)
    num_tokens = gl.load(cu_seqlens_ptr + request + 1) - first_token
    position = seq_len - num_tokens + token
    last = gl.maximum(position // 64 - REACH, 0)  # first segment of the window
    full = (position < dense_below) | ((last - gl.minimum(last, SINKS)) * CELLS <= COUNT)
    row = first_token + token
    out = out_ptr + row.to(gl.int64) * out_strides[0] + kv_head * out_strides[1]
    if full | (token >= num_tokens):
        if (member == 0) & (token < num_tokens):
            FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
            offs = gl.arange(0, 1024, layout=FLAT)
            for begin in range(0, COUNT, 1024):
                gl.store(out + begin + offs, offs * 0 - 1, mask=begin + offs < COUNT)
        return
    chunks = gl.cdiv(last, SEGMENTS)
    active = NEAR + chunks
    if member >= active:
        return
    table = block_table_ptr + request.to(gl.int64) * stride_br
    q_row = q_ptr + row.to(gl.int64) * q_strides[0]
    q_row += kv_head * GROUP * q_strides[1]
    states = state_ptr + group.to(gl.int64) * members * (2 * N)
    counters = counter_ptr + 4 * group
    if member < NEAR:
        near = SINKS + position // 64 + 1 - last
        near_sums(
            states + member * (2 * N),
            q_row,
            k_ptr + kv_head.to(gl.int64) * k_strides[1],
            table,
            gl.minimum(member * NEAR_TURNS, near),
            gl.minimum((member + 1) * NEAR_TURNS, near),
            position,
            SINKS,
            last,
            qk_scale,
            q_strides[1],
            k_strides,
            GROUP,
            N,
            HEAD_DIM,
            PAGE,
        )
        arrive(counters)
        leave(counters, active)
        return

    chunk = member - NEAR
    begin = chunk * SEGMENTS
    TURNS: gl.constexpr = SEGMENTS // WARPS
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    raw = gl.allocate_shared_memory(gl.float16, [TURNS, WARPS, CELLS, N], PLAIN3)
    base_smem = gl.allocate_shared_memory(gl.float32, [TURNS, WARPS, N], PLAIN3)
    gain_smem = gl.allocate_shared_memory(gl.float32, [TURNS, WARPS, N], PLAIN3)
    factor_smem = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    records = records_ptr + kv_head.to(gl.int64) * record_strides[1]
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    segment = begin + gl.arange(0, SEGMENTS, layout=EACH)
    page = gl.load(table + segment * 64 // PAGE, mask=segment < last, other=0).to(gl.int64)
    offset = page * record_strides[0] + (segment * 64 % PAGE) // 64 * RECORD
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    line = gl.arange(0, 16, layout=gl.SliceLayout(0, LINES))
    each = gl.convert_layout(offset, gl.SliceLayout(1, LINES))
    ask_for(records + each[:, None] + gl.minimum(128 * line, RECORD - 1)[None, :])
    where = gl.allocate_shared_memory(
        gl.int64, [TURNS, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    where._reinterpret(gl.int64, [SEGMENTS], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(
        offset // 16
    )
    record_logits(
        raw,
        base_smem,
        gain_smem,
        factor_smem,
        where,
        q_row,
        records,
        qk_scale,
        q_strides[1],
        GROUP,
        N,
        HEAD_DIM,
    )
    # From here on a thread has every fourth cell of two segments, for all heads.
    D: gl.constexpr = gl.BlockedLayout([1, 1, HEADS], [8, 4, 1], [WARPS, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, D)  # [segments, heads]
    FLAT2: gl.constexpr = gl.SliceLayout(2, D)  # [segments, cells]
    SEG: gl.constexpr = gl.SliceLayout(1, FLAT2)
    HEAD: gl.constexpr = gl.SliceLayout(0, ROWS)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINE2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    logits = raw._reinterpret(gl.float16, [SEGMENTS, CELLS, N], LINE)
    bases = base_smem._reinterpret(gl.float32, [SEGMENTS, N], LINE2)
    gains = gain_smem._reinterpret(gl.float32, [SEGMENTS, N], LINE2)
    segment = begin + gl.arange(0, SEGMENTS, layout=SEG)
    cell = gl.arange(0, CELLS, layout=gl.SliceLayout(0, FLAT2))
    record = records + 16 * where._reinterpret(
        gl.int64, [SEGMENTS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    ).load(SEG)
    sizes = gl.load(record[:, None] + (45 * HEAD_DIM // 4) + cell[None, :]).to(gl.int32)
    top = gl.load(record + (45 * HEAD_DIM // 4 + 32)).to(gl.int32)
    sizes = gl.where(sizes > 0, ((sizes + 1904) << 19).to(gl.float32, bitcast=True), 0.0)
    sizes = sizes * (((top & ~1) + 126) << 22).to(gl.float32, bitcast=True)[:, None]
    competes = (segment >= SINKS) & (segment < last)
    if HEADS == N:
        x = logits.load(D).to(gl.float32)
        base = bases.load(ROWS)
        gain = gains.load(ROWS)
        factor = factor_smem.load(HEAD)
    else:
        x = logits.slice(0, HEADS, dim=2).load(D).to(gl.float32)
        base = bases.slice(0, HEADS, dim=1).load(ROWS)
        gain = gains.slice(0, HEADS, dim=1).load(ROWS)
        factor = factor_smem.slice(0, HEADS, dim=0).load(HEAD)
    x = base[:, None, :] + x * (sizes[:, :, None] * factor[None, None, :])
    x = gl.where(competes[:, None, None], x, -1.0e30)
    highest = gl.max(gl.max(x, axis=1), axis=0)  # [HEADS]
    weights = gl.exp2(x - highest[None, None, :])
    weights = gl.where(competes[:, None, None], weights, 0.0)
    sums = gl.sum(gl.sum(weights, axis=1), axis=0)
    weights = weights.to(gl.bfloat16)  # kept while the group agrees
    h = gl.arange(0, HEADS, layout=HEAD)
    gl.store(states + member * (2 * N) + 2 * h, highest)
    gl.store(states + member * (2 * N) + 2 * h + 1, 2.0 * sums)
    arrive(counters)
    wait_for(counters, active)

    # The whole group's total of each head: [members, heads].
    TABLE: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    m = gl.arange(0, MOST, layout=gl.SliceLayout(1, TABLE))
    th = gl.arange(0, HEADS, layout=gl.SliceLayout(0, TABLE))
    at = states + m[:, None] * (2 * N) + 2 * th[None, :]
    tops = gl.load(at, mask=(m < active)[:, None], other=-1.0e30, cache_modifier=".cg")
    parts = gl.load(at + 1, mask=(m < active)[:, None], other=0.0, cache_modifier=".cg")
    whole_top = gl.max(tops, axis=0)
    whole = gl.sum(parts * gl.exp2(tops - whole_top[None, :]), axis=0)
    total = gl.convert_layout(whole_top + log2(whole), HEAD)
    share = gl.exp2(gain + (highest - total + 1.0)[None, :])  # of a weight, [segments, heads]
    heads_live = (gl.arange(0, HEADS, layout=HEAD) < GROUP)[None, :]
    share = gl.where(heads_live, share, 0.0)
    score = gl.sum(weights.to(gl.float32) * share[:, None, :], axis=2)  # [segments, cells]
    score = gl.where(score > 0.0, score, 0.0)
    key = (score.to(gl.int32, bitcast=True) >> 21) - RULE.FIRST_KEY
    key = gl.minimum(gl.maximum(key, 0), KEYS - 1)
    key = gl.where(competes[:, None], key, -1)

    # In rows of 32 cells, one for each lane of a warp: [turns, warps, lanes].
    ROWS3: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    key = gl.convert_layout(gl.reshape(key, [TURNS, WARPS, 32]), ROWS3)
    counts = count_ptr + group.to(gl.int64) * members * KEYS
    low, high = count_keys(key)
    low = gl.sum(gl.sum(low, axis=0), axis=0)
    high = gl.sum(gl.sum(high, axis=0), axis=0)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, ROWS3)))
    gl.store(counts + chunk * KEYS + lane, low)
    gl.store(counts + chunk * KEYS + 32 + lane, high)
    arrive(counters + 1)
    wait_for(counters + 1, chunks)
    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    FLAT1: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    other = gl.arange(0, MOST, layout=gl.SliceLayout(1, PAIR))
    bins = gl.arange(0, KEYS, layout=gl.SliceLayout(0, PAIR))
    every = gl.load(
        counts + other[:, None] * KEYS + bins[None, :],
        mask=(other < chunks)[:, None],
        other=0,
        cache_modifier=".cg",
    )
    reach = gl.convert_layout(gl.sum(every, axis=0), FLAT1)
    reach = gl.associative_scan(reach, 0, add, reverse=True)
    threshold = gl.sum((reach >= COUNT).to(gl.int32), axis=0) - 1
    needed = COUNT - gl.max(gl.where(reach < COUNT, reach, 0), axis=0)
    earlier = gl.where((other < chunk)[:, None], every, 0)
    more = gl.where((bins > threshold)[None, :], earlier, 0)
    same = gl.where((bins == threshold)[None, :], earlier, 0)
    more_before = gl.sum(gl.sum(more, axis=1), axis=0)  # in earlier programs
    same_before = gl.sum(gl.sum(same, axis=1), axis=0)

    first, within = ranks(key, threshold)  # of rows, and within them
    LINE1: gl.constexpr = gl.SliceLayout(2, ROWS3)
    first = gl.convert_layout(gl.reshape(gl.max(first, axis=2), [SEGMENTS]), FLAT1)
    until = gl.associative_scan(first, 0, add) - first
    until = gl.convert_layout(gl.reshape(until, [TURNS, WARPS]), LINE1)
    place = until[:, :, None] + within
    tie = same_before + (place >> 16)
    chosen = (key > threshold) | ((key == threshold) & (tie < needed))
    place = more_before + (place & 0xFFFF) + gl.minimum(tie, needed)
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, LINE1))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(0, LINE1))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS3)))
    index = (begin + turn[:, None] * WARPS + warp[None, :])[:, :, None] * CELLS + lane[
        None, None, :
    ]
    gl.store(out + place, index, mask=chosen)

    chosen = gl.convert_layout(gl.reshape(chosen.to(gl.int32), [SEGMENTS, CELLS]), FLAT2)
    left = gl.where(chosen[:, :, None] > 0, 0.0, weights.to(gl.float32))
    left = gl.sum(left, axis=1)  # [segments, heads]
    logit = gl.where(left > 0.0, highest[None, :] + log2(left) + 1.0, float("-inf"))
    rows = begin + gl.arange(0, SEGMENTS, layout=gl.SliceLayout(1, ROWS))
    heads = gl.arange(0, HEADS, layout=HEAD)
    at = (
        tail_ptr
        + row.to(gl.int64) * tail_strides[0]
        + (kv_head * GROUP + heads)[None, :] * tail_strides[1]
    )
    keep = (rows >= SINKS) & (rows < last)
    gl.store(at + rows[:, None], logit, mask=keep[:, None] & (heads < GROUP)[None, :])
    leave(counters, active)


@gluon.jit
def add(a, b):
    return a + b

"""Weights of cells by the records of their segments, by NVIDIA's matrix units (Gluon).

One warp a program, which copies records ahead to shared memory.  Instructions bound it: some 200
for a record of 64 keys, whose 1.4 KiB take four fifths as long to read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsek_kernels.common.kernels.gluon_names import reinterpret, thread_barrier
from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.paged.index.page_records.config import MOST_EACH
from sparsek_kernels.paged.index.page_records.kernels.lanes_sm80 import (
    LANES,
    highest_of_rows,
    shuffle,
)
from sparsek_kernels.paged.index.page_records.kernels.products_sm80 import (
    MOST_LEVEL,
    cell_products,
    largest_channel,
    product_of_parts,
    query_columns,
    query_rows,
    query_squares,
)
from sparsek_kernels.paged.index.page_records.kernels.read_sm80 import (
    copy_turn,
    load_turn,
    units_of,
)

NONE: gl.constexpr = gl.constexpr(-1.0e30)
STAGES: gl.constexpr = gl.constexpr(3)
"""Turns whose records are in shared memory."""
MOST: gl.constexpr = gl.constexpr(MOST_EACH)
LEAST: gl.constexpr = gl.constexpr(2.0**-31)
"""The smallest weight beside the largest one of its segment."""


@gluon.jit
def pack_weights(a, b, c, d):
    """Four weights of ``2 ** -31`` to 1 in a byte each: 5 bits of exponent and 3 of mantissa."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        shl.b32 a, $1, 4;
        add.u32 a, a, 0x00800000;
        shl.b32 b, $2, 4;
        add.u32 b, b, 0x00800000;
        shl.b32 c, $3, 4;
        add.u32 c, c, 0x00800000;
        shl.b32 d, $4, 4;
        add.u32 d, d, 0x00800000;
        prmt.b32 a, a, b, 0x0073;
        prmt.b32 c, c, d, 0x0073;
        prmt.b32 $0, a, c, 0x5410;
        }
        """,
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def store_to_keep(at, first, second, valid):
    """Store two words that the L2 cache keeps for the next kernel while much else is read."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b64 keep;
        setp.ne.s32 p, $4, 0;
        createpolicy.fractional.L2::evict_last.b64 keep, 1.0;
        @p st.global.L2::cache_hint.v2.b32 [$1], {$2, $3}, keep;
        mov.b32 $0, 0;
        }
        """,
        "=&r,l,r,r,r", [at.to(gl.int64), first, second, valid.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def weigh_cells(
    products, base, state, spot, half, valid, weights_ptr, tops_ptr, g, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Store weights of a thread's cells for two columns, and add them to the running sums.

    spot: ``[32]``, segments counted from those of all tokens before; half: which two columns;
    valid: which threads have cells that compete.
    """
    b0, b1 = base
    c0, c1, c2, c3, d0, d1, d2, d3 = products
    c0, c1, c2, c3 = c0 + b0, c1 + b1, c2 + b0, c3 + b1
    d0, d1, d2, d3 = d0 + b0, d1 + b1, d2 + b0, d3 + b1
    m0 = gl.maximum(gl.maximum(c0, c2), gl.maximum(d0, d2))
    m1 = gl.maximum(gl.maximum(c1, c3), gl.maximum(d1, d3))
    m0 = gl.maximum(highest_of_rows(m0), NONE)
    m1 = gl.maximum(highest_of_rows(m1), NONE)
    c0, c1 = gl.maximum(gl.exp2(c0 - m0), LEAST), gl.maximum(gl.exp2(c1 - m1), LEAST)
    c2, c3 = gl.maximum(gl.exp2(c2 - m0), LEAST), gl.maximum(gl.exp2(c3 - m1), LEAST)
    d0, d1 = gl.maximum(gl.exp2(d0 - m0), LEAST), gl.maximum(gl.exp2(d1 - m1), LEAST)
    d2, d3 = gl.maximum(gl.exp2(d2 - m0), LEAST), gl.maximum(gl.exp2(d3 - m1), LEAST)
    # weights: [segments, 8 rows, columns / 2, 4 cells, 2 columns]
    at = weights_ptr + spot * (32 * COLUMNS) + g * (4 * COLUMNS) + half * 8
    store_to_keep(at, pack_weights(c0, c1, c2, c3), pack_weights(d0, d1, d2, d3), valid)
    at = spot * COLUMNS + 2 * half
    gl.store(tops_ptr + at, m0, mask=valid & (g == 0))
    gl.store(tops_ptr + at + 1, m1, mask=valid & (g == 0))
    h0, t0, h1, t1 = state
    n0 = gl.where(valid, gl.maximum(h0, m0), h0)
    n1 = gl.where(valid, gl.maximum(h1, m1), h1)
    a0 = gl.where(valid, (c0 + c2 + d0 + d2) * gl.exp2(m0 - n0), 0.0)
    a1 = gl.where(valid, (c1 + c3 + d1 + d3) * gl.exp2(m1 - n1), 0.0)
    return n0, t0 * gl.exp2(h0 - n0) + a0, n1, t1 * gl.exp2(h1 - n1) + a1


@gluon.jit
def join_state(state, lane, OFF: gl.constexpr):
    """Running sums of two columns, with those of the thread ``lane ^ OFF``."""
    h0, t0, h1, t1 = state
    o0, u0 = shuffle(h0, lane ^ OFF), shuffle(t0, lane ^ OFF)
    o1, u1 = shuffle(h1, lane ^ OFF), shuffle(t1, lane ^ OFF)
    n0, n1 = gl.maximum(h0, o0), gl.maximum(h1, o1)
    t0 = t0 * gl.exp2(h0 - n0) + u0 * gl.exp2(o0 - n0)
    t1 = t1 * gl.exp2(h1 - n1) + u1 * gl.exp2(o1 - n1)
    return n0, t0, n1, t1


@gluon.jit
def segments_of_program(far, programs, at_once):
    """Far segments of each of some programs: as few as let all of these run at once, or 16.

    So many programs share a short context in a graph that is made for long ones.
    """
    return 2 * gl.maximum(
        gl.cdiv(far, 2 * programs), gl.minimum(gl.cdiv(far, 2 * at_once), MOST // 2)
    )


@gluon.jit
def near_keys(k_ptr, page, key, ak, reach, stride_kp, stride_kt, PAGE: gl.constexpr):
    """Keys ``[16, HEAD_DIM]`` of a page, up to position ``reach``."""
    rows = k_ptr + page * stride_kp + ((key % PAGE) * stride_kt)[:, None] + ak
    return gl.load(rows, mask=(key <= reach)[:, None], other=0.0)


@gluon.jit
def near_sums(
    states, q_row, k_ptr, table, segment, position, num_tokens, qk_scale, stride_qh, stride_qt,
    k_strides,
    GROUP: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Leave each row's maximum and sum of exps of the keys of one near segment.

    position: of the first of ``num_tokens`` tokens; the others follow it.  Rows of tokens that the
    request does not have are zeros.
    """
    stride_kp, _stride_kh, stride_kt = k_strides
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    bk = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, B))[:, None]
    bn = gl.arange(0, N, layout=gl.SliceLayout(0, B))[None, :]
    at = q_row + (bn // GROUP) * stride_qt + (bn % GROUP).to(gl.int64) * stride_qh + bk
    q = gl.load(at, mask=bn < num_tokens * GROUP, other=0.0)
    am = gl.arange(0, 16, layout=gl.SliceLayout(1, A))
    ak = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, A))[None, :]
    cm = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))[:, None]
    cn = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))[None, :]
    page = gl.load(table + segment * 64 // PAGE).to(gl.int64)
    highest = gl.full([16, N], NONE, gl.float32, MMA)
    total = gl.zeros([16, N], gl.float32, MMA)
    reach = position + num_tokens - 1
    coming = near_keys(k_ptr, page, segment * 64 + am, ak, reach, stride_kp, stride_kt, PAGE)
    for part in gl.static_range(4):
        k = coming
        if part < 3:
            key = segment * 64 + (part * 16 + 16) + am
            coming = near_keys(k_ptr, page, key, ak, reach, stride_kp, stride_kt, PAGE)
        logit = mma_v2(k.to(q.dtype), q, gl.zeros([16, N], gl.float32, MMA)) * qk_scale
        place = segment * 64 + part * 16 + cm
        logit = gl.where(place <= position + cn // GROUP, logit, NONE)
        top = gl.maximum(highest, logit)
        total = total * gl.exp2(highest - top) + gl.exp2(logit - top)
        highest = top
    every = gl.max(highest, axis=0)
    sums = gl.sum(total * gl.exp2(highest - every[None, :]), axis=0)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
    gl.store(states + 2 * n, every, mask=n < COLUMNS)
    gl.store(states + 2 * n + 1, gl.where(every > NONE, sums, 0.0), mask=n < COLUMNS)


@gluon.jit(do_not_specialize=["dense_below", "members", "at_once", "width"])
def weigh_cells_kernel(
    weights_ptr, tops_ptr, gains_ptr, state_ptr, counter_ptr, q_ptr, k_ptr, records_ptr,
    block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, dense_below, members, at_once, width, q_strides, k_strides, record_strides,
    stride_br,
    RULE: gl.constexpr, SHAPE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Weights of cells, and sums over them and over keys, for requests' rows of a KV head.

    A program reads the keys of one segment, of the sinks or the tokens' own, or the records of
    others, for 8 columns of scratch.  ``members`` programs for each request, KV head and 8 columns,
    of which ``at_once`` run at once.
    """
    GROUP: gl.constexpr = SHAPE.GROUP
    NUM_KV_HEADS: gl.constexpr = SHAPE.NUM_KV_HEADS
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    PAGE: gl.constexpr = SHAPE.PAGE_SIZE
    RECORD: gl.constexpr = SHAPE.RECORD
    QUERY_LEN: gl.constexpr = SHAPE.QUERY_LEN
    COUNT: gl.constexpr = RULE.SCORED_BLOCKS
    SINKS: gl.constexpr = RULE.SINK_BLOCKS // 32
    REACH: gl.constexpr = RULE.REACH_BLOCKS // 32
    NEAR: gl.constexpr = SINKS + (2 if QUERY_LEN > 1 else 1)
    ROWS: gl.constexpr = QUERY_LEN * GROUP
    COLUMNS: gl.constexpr = SHAPE.COLUMNS
    TWO: gl.constexpr = COLUMNS == 4
    PARTS: gl.constexpr = 1 if TWO else COLUMNS // 8
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    # The programs of all columns and KV heads read the same pages, side by side.  Those of near
    # segments are the last ones: they are short.
    jobs = gl.num_programs(0) // (PARTS * (members - NEAR) + NEAR)
    all_far = jobs * PARTS * (members - NEAR)
    is_near = gl.program_id(0) >= all_far
    number = gl.where(is_near, gl.program_id(0) - all_far, gl.program_id(0) // PARTS)
    part = gl.where(is_near, 0, gl.program_id(0) % PARTS)
    each = gl.where(is_near, NEAR, members - NEAR)
    kv_head = number % NUM_KV_HEADS
    member = number // NUM_KV_HEADS % each + gl.where(is_near, 0, NEAR)
    request = number // NUM_KV_HEADS // each
    job = request * NUM_KV_HEADS + kv_head
    if member == 0:
        gl.store(counter_ptr + job, 0)  # for the programs that cut
    seq_len = gl.load(seq_lens_ptr + request).to(gl.int32)
    first_token = gl.load(cu_seqlens_ptr + request).to(gl.int32)
    num_tokens = gl.load(cu_seqlens_ptr + request + 1).to(gl.int32) - first_token
    position = seq_len - num_tokens
    own = position // 64  # the first token's segment: those before it have records
    far_end = gl.minimum(own, width)  # a row of scratch has no more
    last = gl.maximum(far_end - REACH, 0)  # first segment of the window
    full = (position < dense_below) | ((last - gl.minimum(last, SINKS)) * 32 <= COUNT)
    if full | (num_tokens <= 0):
        return
    segments = segments_of_program(far_end - SINKS, members - NEAR, at_once)
    begin = SINKS + (member - NEAR) * segments
    if (member >= NEAR) & (begin >= far_end):
        return
    table = block_table_ptr + request.to(gl.int64) * stride_br
    q_row = q_ptr + first_token.to(gl.int64) * q_strides[0]
    q_row += (kv_head * GROUP).to(gl.int64) * q_strides[1]
    states = state_ptr + (job.to(gl.int64) * members + member) * (2 * COLUMNS)
    if member < NEAR:
        segment = gl.where(member < SINKS, member, own + member - SINKS)
        if segment * 64 < seq_len:
            near_sums(
                states, q_row, k_ptr + kv_head.to(gl.int64) * k_strides[1], table, segment,
                position, 1 if QUERY_LEN == 1 else num_tokens, qk_scale, q_strides[1], q_strides[0],
                k_strides, GROUP, max(COLUMNS, 8), COLUMNS, HEAD_DIM, PAGE,
            )  # fmt: skip
        else:
            n = gl.arange(0, 32, layout=LANES)
            gl.store(states + 2 * n, gl.full([32], NONE, gl.float32, LANES), mask=n < COLUMNS)
            gl.store(states + 2 * n + 1, gl.zeros([32], gl.float32, LANES), mask=n < COLUMNS)
        return

    lane = gl.arange(0, 32, layout=LANES)
    g = lane >> 2
    k = lane & 3
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    records = records_ptr + kv_head.to(gl.int64) * record_strides[1]
    page_units = record_strides[0] // 16
    spot = job.to(gl.int64) * width
    end = gl.minimum(begin + segments, far_end)
    W: gl.constexpr = HEAD_DIM // 64
    SPLIT: gl.constexpr = 4 if TWO else 2
    MEANS: gl.constexpr = HEAD_DIM // SPLIT // 8
    VARIANCES: gl.constexpr = 2 * (HEAD_DIM // (2 if HEAD_DIM // SPLIT < 32 else SPLIT) // 32)
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    level_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM, 4], PLAIN2)
    rest_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HEAD_DIM // 2, 4], PLAIN2)

    none, zero = gl.full([32], NONE, gl.float32, LANES), gl.zeros([32], gl.float32, LANES)
    state = (none, zero, none, zero)
    turns = (end - begin + 1) // 2
    units = units_of(table, gl.minimum(begin + lane, far_end - 1), page_units, PAGE, RECORD)
    for turn in gl.static_range(STAGES - 1):
        copy_turn(
            level_ring.index(turn), rest_ring.index(turn), records, units, 2 * turn,
            HEAD_DIM, RECORD,
        )  # fmt: skip
        async_copy.commit_group()
    column = (g & 3) if TWO else g
    left = 8 * (k & 1 if TWO else k)  # the thread of the first column of this thread's products
    row = 8 * part + column
    live = (row < ROWS) & (row // GROUP < num_tokens)
    at = q_row + (row // GROUP) * q_strides[0] + (row % GROUP).to(gl.int64) * q_strides[1]
    largest = largest_channel(at, live, k, DTYPE, HEAD_DIM)
    unit = MOST_LEVEL / largest
    # A power of two, so that a query of 16 bits stays what it is: means may be hundreds.
    unit_of_mean = (unit.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    query = query_columns(at, live, unit, k, DTYPE, HEAD_DIM)
    of = g // (16 // SPLIT)
    heads = query_rows(at, live, unit_of_mean, of, k, DTYPE, SPLIT, HEAD_DIM)
    squares = query_squares(at, live, 1.0 / largest, of, k, DTYPE, SPLIT, HEAD_DIM)
    factor = qk_scale / (32.0 * unit)
    factors = (shuffle(factor, left), shuffle(factor, left + 4))
    mean_factor = qk_scale / unit_of_mean
    spread = largest * qk_scale * LN2
    for turn in range(turns):
        async_copy.wait_group(STAGES - 2)
        thread_barrier()
        coming = turn + STAGES - 1
        if coming < turns:
            if coming % 16 == 0:
                following = gl.minimum(begin + 2 * coming + lane, far_end - 1)
                units = units_of(table, following, page_units, PAGE, RECORD)
            copy_turn(
                level_ring.index(coming % STAGES), rest_ring.index(coming % STAGES), records, units,
                coming % 16 * 2, HEAD_DIM, RECORD,
            )  # fmt: skip
        async_copy.commit_group()
        read = load_turn(
            reinterpret(level_ring.index(turn % STAGES), gl.int32, [8, 32, W], PLAIN2),
            rest_ring.index(turn % STAGES), SPLIT, HEAD_DIM,
        )  # fmt: skip
        at_segment = begin + turn * 2
        mean = product_of_parts(heads, read[4], MEANS, SPLIT, k, g) * mean_factor
        variance = product_of_parts(squares, read[5], VARIANCES, SPLIT, k, g)
        gain = (gl.sqrt(1.0 + variance * (spread * spread)) - 1.0) * LOG2E
        head = g % (16 // SPLIT)
        segment = at_segment + (k >> 1)
        to_gain = gains_ptr + (spot + segment) * COLUMNS + (8 * part + head)
        first = (k % 2 == 0) & (g < 16 // SPLIT) & (head < COLUMNS) & (segment < end)
        gl.store(to_gain, gain, mask=first)
        if TWO:
            products = cell_products(read, query, 0, g, k, factors, W, True)
            source = (k & 1) * 8 + k
            base = (shuffle(mean, source), shuffle(mean, source + 4))
            state = weigh_cells(
                products, base, state, spot + segment, k & 1, segment < end,
                weights_ptr, tops_ptr, g, COLUMNS,
            )  # fmt: skip
        else:
            for r in gl.static_range(2):
                products = cell_products(read, query, r, g, k, factors, W, False)
                base = (shuffle(mean, 8 * k + 2 * r), shuffle(mean, 8 * k + 2 * r + 4))
                segment = at_segment + r + 0 * k
                state = weigh_cells(
                    products, base, state, spot + segment, k, segment < end,
                    weights_ptr + part * 32, tops_ptr + 8 * part, g, COLUMNS,
                )  # fmt: skip
    state = join_state(join_state(join_state(state, lane, 4), lane, 8), lane, 16)
    if TWO:
        state = join_state(state, lane, 2)
    at = states + 2 * (8 * part + 2 * k)
    keep = (g == 0) & (8 * part + 2 * k < COLUMNS)
    gl.store(at, state[0], mask=keep)
    gl.store(at + 1, 2.0 * state[1], mask=keep)
    gl.store(at + 2, state[2], mask=keep)
    gl.store(at + 3, 2.0 * state[3], mask=keep)

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

The matrix units multiply levels, which are floats after one shift and one mask, with queries that
were scaled by the record's sizes of pairs.  Reading bounds the kernel: 1.5 KiB for 64 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sparsek_kernels.common.kernels.barrier_sm90 import thread_barrier
from sparsek_kernels.common.kernels.softmax import LN2, LOG2E
from sparsek_kernels.paged.index.page_records.config import NEAR_OF_PROGRAM, SEGMENTS_OF_PROGRAM

WARPS: gl.constexpr = gl.constexpr(4)
SEGMENTS: gl.constexpr = gl.constexpr(SEGMENTS_OF_PROGRAM)
"""Segments of a program: 16 of each warp."""
CELLS: gl.constexpr = gl.constexpr(32)
TOGETHER: gl.constexpr = gl.constexpr(2)
"""Records of a warp that are read together."""
NEAR_TURNS: gl.constexpr = gl.constexpr(NEAR_OF_PROGRAM)
"""Near segments of a program that reads them."""

_LEVELS: gl.constexpr = gl.constexpr(
    """
    {
    .reg .b32 t;
    lop3.b32 $1, $8, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 8;
    lop3.b32 $0, t, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 1;
    lop3.b32 $3, t, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 9;
    lop3.b32 $2, t, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 2;
    lop3.b32 $5, t, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 10;
    lop3.b32 $4, t, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 3;
    lop3.b32 $7, t, 0x88008800, 0x34003400, 0xEA;
    shl.b32 t, $8, 11;
    lop3.b32 $6, t, 0x88008800, 0x34003400, 0xEA;
    }
    """
)
_SCALES: gl.constexpr = gl.constexpr(
    """
    {
    .reg .b32 t;
    shl.b32 t, $4, 9;
    and.b32 t, t, 0x1E001E00;
    sub.u32 $0, $5, t;
    shl.b32 t, $4, 1;
    and.b32 t, t, 0x1E001E00;
    sub.u32 $1, $5, t;
    shl.b32 t, $4, 5;
    and.b32 t, t, 0x1E001E00;
    sub.u32 $2, $5, t;
    shr.u32 t, $4, 3;
    and.b32 t, t, 0x1E001E00;
    sub.u32 $3, $5, t;
    }
    """
)
_LEVELS_IN_ORDER: gl.constexpr = gl.constexpr(
    """
    {
    .reg .b32 t;
    lop3.b32 t, $8, 0x88888888, 0x34343434, 0xEA;
    prmt.b32 $0, t, 0, 0x1404;
    prmt.b32 $1, t, 0, 0x3424;
    shl.b32 t, $8, 1;
    lop3.b32 t, t, 0x88888888, 0x34343434, 0xEA;
    prmt.b32 $2, t, 0, 0x1404;
    prmt.b32 $3, t, 0, 0x3424;
    shl.b32 t, $8, 2;
    lop3.b32 t, t, 0x88888888, 0x34343434, 0xEA;
    prmt.b32 $4, t, 0, 0x1404;
    prmt.b32 $5, t, 0, 0x3424;
    shl.b32 t, $8, 3;
    lop3.b32 t, t, 0x88888888, 0x34343434, 0xEA;
    prmt.b32 $6, t, 0, 0x1404;
    prmt.b32 $7, t, 0, 0x3424;
    }
    """
)
_SCALES_IN_ORDER: gl.constexpr = gl.constexpr(
    """
    {
    .reg .b32 t, u;
    and.b32 t, $4, 0x0F0F0F0F;
    shl.b32 t, t, 1;
    prmt.b32 u, t, 0, 0x1404;
    sub.u32 $0, $5, u;
    prmt.b32 u, t, 0, 0x3424;
    sub.u32 $1, $5, u;
    and.b32 t, $4, 0xF0F0F0F0;
    shr.u32 t, t, 3;
    prmt.b32 u, t, 0, 0x1404;
    sub.u32 $2, $5, u;
    prmt.b32 u, t, 0, 0x3424;
    sub.u32 $3, $5, u;
    }
    """
)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def levels_of(packed, QUARTER: gl.constexpr):
    """A quarter of each level, in four planes of channels, float16."""
    return gl.inline_asm_elementwise(
        _LEVELS_IN_ORDER if QUARTER == 16 else _LEVELS,
        "=r,=r,=r,=r,=r,=r,=r,=r,r",
        [packed],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def scales_of(pairs, top, QUARTER: gl.constexpr):
    """Sizes of the low and the high pairs, float16, less the exponent of ``top``."""
    one = 0x3C003C00 + (top.to(gl.int32) & 1) * 0x02000200
    return gl.inline_asm_elementwise(
        _SCALES_IN_ORDER if QUARTER == 16 else _SCALES,
        "=r,=r,=r,=r,r,r,r,r,r",
        [pairs, one],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=4,
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


@gluon.jit
def near_sums(
    state,
    q_row,
    k_ptr,
    table,
    first,
    end,
    position,
    sinks,
    first_local,
    qk_scale,
    stride_qh,
    k_strides,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Leave each head's maximum and sum of exps of the near segments ``[first, end)``."""
    stride_kp, _stride_kh, stride_kt = k_strides
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    bk = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    bn = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    q = gl.load(q_row + bn * stride_qh + bk, mask=bn < GROUP, other=0.0)
    q = gl.broadcast(q, gl.zeros([WARPS, HEAD_DIM, N], q.dtype, B))[0]
    aw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    am = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    ak = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    cw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    cm = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    highest = gl.full([WARPS, 16, N], -1.0e30, gl.float32, MMA)
    total = gl.zeros([WARPS, 16, N], gl.float32, MMA)
    for turn in range(first, end, WARPS // 4):
        n = turn + aw // 4
        segment = gl.where(n < sinks, n, first_local + n - sinks)
        page = gl.load(table + segment * 64 // PAGE, mask=n < end, other=0).to(gl.int64)
        key = segment * 64 + aw % 4 * 16 + am
        at = k_ptr + page * stride_kp + (key % PAGE) * stride_kt + ak
        k = gl.load(at, mask=(key <= position) & (n < end), other=0.0)
        logit = mma_v2(k.to(q.dtype), q, gl.zeros([WARPS, 16, N], gl.float32, MMA)) * qk_scale
        n = turn + cw // 4
        key = gl.where(n < sinks, n, first_local + n - sinks) * 64 + cw % 4 * 16 + cm
        logit = gl.where((key <= position) & (n < end), logit, -1.0e30)
        top = gl.maximum(highest, logit)
        total = total * gl.exp2(highest - top) + gl.exp2(logit - top)
        highest = top
    every = gl.max(gl.max(highest, axis=1), axis=0)  # [N]
    sums = gl.sum(gl.sum(total * gl.exp2(highest - every[None, None, :]), axis=1), axis=0)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
    gl.store(state + 2 * n, every)
    gl.store(state + 2 * n + 1, gl.where(every > -1.0e30, sums, 0.0))


@gluon.jit
def ask_for(pointers):
    """Let lines come into the second-level cache."""
    gl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [pointers],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def read_levels(
    records,
    where,
    turn,
    offsets,
    pairs_at,
    A: gl.constexpr,
    B: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Levels, pairs and largest size of each warp's record of a turn."""
    place = where.index(turn)
    at = records + 16 * place.load(gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    packed = gl.load(at + offsets)
    at = records + 16 * place.load(gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None]
    return packed, gl.load(at + 11 * HEAD_DIM + pairs_at), gl.load(at + (45 * HEAD_DIM // 4 + 32))


@gluon.jit
def record_logits(
    raw,
    base_smem,
    gain_smem,
    factor_smem,
    where,
    q_row,
    records,
    qk_scale,
    stride_qh,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Products of the query with the levels of 64 records, and what their means and spreads say.

    raw: ``[16, WARPS, 32, N]`` float16 in shared memory; base_smem, gain_smem: ``[16, WARPS, N]``
    float32; factor_smem: ``[N]`` float32, what ``raw`` is multiplied by; where: ``[16, WARPS]``
    int64, where the records of the warps are, in 16 bytes.
    """
    QUARTER: gl.constexpr = HEAD_DIM // 4
    HALF: gl.constexpr = HEAD_DIM // 2
    TURNS: gl.constexpr = SEGMENTS // WARPS
    KW: gl.constexpr = 2 if QUARTER == 16 else 4
    SW: gl.constexpr = 4 if HALF == 32 else 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, KW)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, KW)
    AM: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    BM: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    AS: gl.constexpr = gl.DotOperandLayout(0, MMA, SW)
    BS: gl.constexpr = gl.DotOperandLayout(1, MMA, SW)

    # the query in planes of channels, [1, QUARTER, N], with its largest channel at 256
    bk = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    bn = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    if QUARTER > 16:  # the order in which a thread's four bytes come apart
        bk = (bk & ~3) | ((bk & 1) << 1) | ((bk >> 1) & 1)
    at = q_row + bn * stride_qh + bk
    live = bn < GROUP
    q0 = gl.load(at, mask=live, other=0.0).to(gl.float32)
    q1 = gl.load(at + QUARTER, mask=live, other=0.0).to(gl.float32)
    q2 = gl.load(at + 2 * QUARTER, mask=live, other=0.0).to(gl.float32)
    q3 = gl.load(at + 3 * QUARTER, mask=live, other=0.0).to(gl.float32)
    largest = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    largest = gl.max(largest, axis=1)  # [1, N]
    largest = gl.where(largest > 0.0, largest, 1.0)
    unit = (256.0 / largest)[:, None, :]
    q0 = (q0 * unit).to(gl.float16)
    q1 = (q1 * unit).to(gl.float16)
    q2 = (q2 * unit).to(gl.float16)
    q3 = (q3 * unit).to(gl.float16)

    # means and spreads: [WARPS, TURNS, channels]
    AT: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, WARPS], [1, 0])
    at_rows = where._reinterpret(
        gl.int64, [TURNS, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ).load(AT)
    at_rows = 16 * gl.permute(at_rows, [1, 0])  # [WARPS, TURNS]
    k = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, AM)))[None, None, :]
    record = records + gl.convert_layout(at_rows, gl.SliceLayout(2, AM))[:, :, None]
    mean = gl.load((record + 8 * HEAD_DIM + 2 * k).to(gl.pointer_type(gl.bfloat16)))
    mk = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, BM)))[None, :, None]
    mn = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, BM)))[None, None, :]
    q = gl.load(q_row + mn * stride_qh + mk, mask=mn < GROUP, other=0.0).to(gl.bfloat16)
    zero = gl.zeros([WARPS, TURNS, N], gl.float32, MMA)
    q = gl.broadcast(q, gl.zeros([WARPS, HEAD_DIM, N], gl.bfloat16, BM))[0]
    base = mma_v2(mean, q, zero) * qk_scale
    k = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, AS)))[None, None, :]
    record = records + gl.convert_layout(at_rows, gl.SliceLayout(2, AS))[:, :, None]
    spread = gl.load(record + 10 * HEAD_DIM + k).to(gl.float8e4nv, bitcast=True)
    spread = spread.to(gl.float16) * 0.0625  # so that squares fit
    sk = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(2, BS)))[None, :, None]
    sn = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, BS)))[None, None, :]
    at = q_row + sn * stride_qh + sk
    of_low = gl.load(at, mask=sn < GROUP, other=0.0).to(gl.float32)
    of_high = gl.load(at + HALF, mask=sn < GROUP, other=0.0).to(gl.float32)
    size = gl.convert_layout(largest, gl.SliceLayout(1, BS))[:, None, :]
    squares = ((of_low * of_low + of_high * of_high) / (size * size)).to(gl.float16)
    squares = gl.broadcast(squares, gl.zeros([WARPS, HALF, N], gl.float16, BS))[0]
    variance = mma_v2(spread * spread, squares, zero)
    factor = gl.convert_layout(largest, gl.SliceLayout(1, MMA)) * qk_scale  # [1, N]
    deviation = factor * (LN2 * 16.0)
    variance = variance * (deviation * deviation)[:, None, :]
    gain = (gl.sqrt(1.0 + variance) - 1.0) * LOG2E
    base_smem.store(gl.permute(base, [1, 0, 2]))
    gain_smem.store(gl.permute(gain, [1, 0, 2]))

    am = gl.arange(0, CELLS, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    ak = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    pk = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :]
    for turn in range(0, TURNS, TOGETHER):
        read = ()
        for j in gl.static_range(TOGETHER):
            read = read + (  # type: ignore[assignment]  # noqa: RUF005 - no stars in Gluon
                read_levels(records, where, turn + j, am * QUARTER + ak, pk, A, B, HEAD_DIM),
            )
        for j in gl.static_range(TOGETHER):
            packed, pairs, top = read[j]  # type: ignore[var-annotated]
            low, high = scales_of(pairs, top, QUARTER)
            l0, l1, l2, l3 = levels_of(packed, QUARTER)
            sums = gl.zeros([WARPS, CELLS, N], gl.float32, MMA)
            sums = mma_v2(l0, q0 * low[:, :, None], sums)
            sums = mma_v2(l1, q1 * high[:, :, None], sums)
            sums = mma_v2(l2, q2 * low[:, :, None], sums)
            sums = mma_v2(l3, q3 * high[:, :, None], sums)
            raw.index(turn + j).store(sums.to(gl.float16))
    factor_smem.store(gl.sum(factor * (4.0 / 256.0), axis=0))


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

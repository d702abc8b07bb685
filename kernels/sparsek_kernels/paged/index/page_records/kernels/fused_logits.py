"""Logits of one token over near keys and over records, by NVIDIA's matrix units (Gluon).

What ``fused.py`` does first.  The units multiply levels, which are floats after one shift and one
mask, with queries that were scaled by the record's sizes of pairs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

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

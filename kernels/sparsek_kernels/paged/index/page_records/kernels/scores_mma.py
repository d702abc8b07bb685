"""Experiment: raw sums of records by mma.sync (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

PAGES: gl.constexpr = gl.constexpr(16)  # of a warp
WARPS: gl.constexpr = gl.constexpr(4)
TOGETHER: gl.constexpr = gl.constexpr(2)


@gluon.jit
def pair_scale(code):
    return ((code + 126) << 22).to(gl.float32, bitcast=True)


@gluon.jit
def record_of(table, segment, last, records, stride_rp, PAGE_SIZE: gl.constexpr, RECORD: gl.constexpr):
    page = gl.load(table + segment * 64 // PAGE_SIZE, mask=segment < last, other=0)
    return records + page.to(gl.int64) * stride_rp + (segment * 64 % PAGE_SIZE) // 64 * RECORD


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


@gluon.jit
def levels_of(packed):
    return gl.inline_asm_elementwise(
        _LEVELS, "=r,=r,=r,=r,=r,=r,=r,=r,r", [packed], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=4
    )


@gluon.jit
def scales_of(pairs, top):
    one = 0x3C003C00 + (top.to(gl.int32) & 1) * 0x02000200
    return gl.inline_asm_elementwise(
        _SCALES, "=r,=r,=r,=r,r,r,r,r,r", [pairs, one], dtype=(gl.float16, gl.float16), is_pure=True, pack=4
    )


@gluon.jit
def record_sums_kernel(
    raw_ptr, base_ptr, gain_ptr, q_ptr, records_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    qk_scale, width, stride_qt, stride_qh, stride_rp, stride_rh, stride_br,
    GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, RECORD: gl.constexpr, SINKS: gl.constexpr, REACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    Q: gl.constexpr = HEAD_DIM // 4
    N: gl.constexpr = 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    A8: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B8: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    chunk = gl.program_id(0)
    kv_head = gl.program_id(1)
    request = gl.program_id(2)
    table = block_table_ptr + request.to(gl.int64) * stride_br
    seq_len = gl.load(seq_lens_ptr + request)
    first_token = gl.load(cu_seqlens_ptr + request)
    position = seq_len - 1
    last = gl.maximum(position // 64 - REACH, 0)
    begin = chunk * (PAGES * WARPS)
    if begin >= last:
        return
    records = records_ptr + kv_head.to(gl.int64) * stride_rh
    q_row = q_ptr + first_token.to(gl.int64) * stride_qt + kv_head * GROUP * stride_qh

    # the query, in planes of channels: [1, Q, N]
    bk = gl.arange(0, Q, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    bk = (bk & ~3) | ((bk & 1) << 1) | ((bk >> 1) & 1)  # the order in which levels come apart
    bn = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    live = bn < GROUP
    at = q_row + bn * stride_qh + bk
    q0 = gl.load(at, mask=live, other=0.0).to(gl.float32)
    q1 = gl.load(at + Q, mask=live, other=0.0).to(gl.float32)
    q2 = gl.load(at + 2 * Q, mask=live, other=0.0).to(gl.float32)
    q3 = gl.load(at + 3 * Q, mask=live, other=0.0).to(gl.float32)
    big = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    largest = gl.max(big, axis=1)  # [1, N]
    largest = gl.where(largest > 0.0, largest, 1.0)
    unit = (256.0 / largest)[:, None, :]
    h0 = (q0 * unit).to(gl.float16)
    h1 = (q1 * unit).to(gl.float16)
    h2 = (q2 * unit).to(gl.float16)
    h3 = (q3 * unit).to(gl.float16)

    # means and spreads of the warps' segments: [WARPS, PAGES, .]
    w_row = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A8)))[:, None, None]
    i_row = gl.arange(0, PAGES, layout=gl.SliceLayout(0, gl.SliceLayout(2, A8)))[None, :, None]
    k_row = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, A8)))[None, None, :]
    segment = begin + w_row * PAGES + i_row
    record = record_of(table, segment, last, records, stride_rp, PAGE_SIZE, RECORD)
    mean = gl.load((record + 8 * HEAD_DIM + 2 * k_row).to(gl.pointer_type(gl.bfloat16)))
    b8k = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, B8)))[None, :, None]
    b8n = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, B8)))[None, None, :]
    qb = gl.load(q_row + b8n * stride_qh + b8k, mask=b8n < GROUP, other=0.0)
    zero = gl.zeros([WARPS, PAGES, N], gl.float32, MMA)
    base = mma_v2(mean, gl.broadcast(qb, gl.zeros([WARPS, HEAD_DIM, N], gl.bfloat16, B8))[0], zero)
    HALF: gl.constexpr = HEAD_DIM // 2
    p_row = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, A8)))[None, None, :]
    spread = gl.load(record + 10 * HEAD_DIM + p_row).to(gl.float8e4nv, bitcast=True)
    spread = spread.to(gl.float16) * 0.0625
    s8k = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(2, B8)))[None, :, None]
    qa = gl.load(q_row + b8n * stride_qh + s8k, mask=b8n < GROUP, other=0.0).to(gl.float32)
    qc = gl.load(q_row + b8n * stride_qh + s8k + HALF, mask=b8n < GROUP, other=0.0).to(gl.float32)
    n8 = gl.convert_layout(largest, gl.SliceLayout(1, B8))[:, None, :]
    squares = ((qa * qa + qc * qc) / (n8 * n8)).to(gl.float16)
    squares = gl.broadcast(squares, gl.zeros([WARPS, HALF, N], gl.float16, B8))[0]
    variance = mma_v2(spread * spread, squares, zero)
    cw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    ci = gl.arange(0, PAGES, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    cn = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    cseg = begin + cw * PAGES + ci
    place = (request * NUM_KV_HEADS + kv_head).to(gl.int64)
    keep = (cn < GROUP) & (cseg < last)
    factor = gl.convert_layout(largest, gl.SliceLayout(1, MMA))[:, None, :] * qk_scale
    f = factor * 0.6931471805599453 * 16.0
    gl.store(base_ptr + (place * width + cseg) * GROUP + cn, base * qk_scale, mask=keep)
    gain = (gl.sqrt_rn(1.0 + f * f * variance) - 1.0) * 1.4426950408889634
    gl.store(gain_ptr + (place * width + cseg) * GROUP + cn, gain, mask=keep)

    # vectors
    aw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    am = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    ak = gl.arange(0, Q, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    pw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None]
    pk = gl.arange(0, Q, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :]
    cm = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    a_at = am * Q + ak
    for first in range(0, PAGES, TOGETHER):
        packed = ()
        pairs = ()
        tops = ()
        for i in gl.static_range(TOGETHER):
            j = first + i
            ra = record_of(table, begin + aw * PAGES + j, last, records, stride_rp, PAGE_SIZE, RECORD)
            rb = record_of(table, begin + pw * PAGES + j, last, records, stride_rp, PAGE_SIZE, RECORD)
            packed = packed + (gl.load(ra + a_at),)
            pairs = pairs + (gl.load(rb + 11 * HEAD_DIM + pk),)
            tops = tops + (gl.load(rb + (45 * HEAD_DIM // 4 + 32)),)
        for i in gl.static_range(TOGETHER):
            low, high = scales_of(pairs[i], tops[i])
            l0, l1, l2, l3 = levels_of(packed[i])
            acc = gl.zeros([WARPS, 32, N], gl.float32, MMA)
            acc = mma_v2(l0, h0 * low[:, :, None], acc)
            acc = mma_v2(l1, h1 * high[:, :, None], acc)
            acc = mma_v2(l2, h2 * low[:, :, None], acc)
            acc = mma_v2(l3, h3 * high[:, :, None], acc)
            seg = begin + cw * PAGES + first + i
            gl.store(
                raw_ptr + ((place * width + seg) * 32 + cm) * GROUP + cn,
                acc.to(gl.float16),
                mask=(cn < GROUP) & (seg < last),
            )

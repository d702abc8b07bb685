"""Gradients of keys and values from the parts that several programs computed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_parts"])
def block_sparse_bwd_parts_kernel(
    dk_ptr, dv_ptr, part_ptr, ends_ptr,
    scale,
    stride_dkb, stride_dkt, stride_dkh,
    num_patterns, num_parts, pattern_kv_heads,
    LISTS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid ``(columns * BLOCK / ROWS, KV heads, batch)``: sum ``ROWS`` keys over their parts.

    Parts are added in their order.  Columns without parts are done already.
    """
    SHARES: tl.constexpr = BLOCK // ROWS
    column = tl.program_id(0) // SHARES
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    offs = tl.program_id(0) % SHARES * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, HEAD_DIM)
    first = column * num_patterns + kv_head * LISTS // pattern_kv_heads
    begin = tl.load(ends_ptr + first - 1, mask=first > 0, other=0)
    end = tl.load(ends_ptr + first + LISTS - 1)
    if begin < end:
        dk = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        dv = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        for index in range(begin, end):
            at = (batch * num_parts + index) * pattern_kv_heads + kv_head % pattern_kv_heads
            part = part_ptr + at.to(tl.int64) * (2 * BLOCK * HEAD_DIM)
            part = part + offs[:, None] * HEAD_DIM + offs_d[None, :]
            dk += tl.load(part)
            dv += tl.load(part + BLOCK * HEAD_DIM)
        key = (column * BLOCK + offs).to(tl.int64)
        base = batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh
        offsets = base + key[:, None] * stride_dkt + offs_d[None, :]
        tl.store(dk_ptr + offsets, (dk * scale).to(dk_ptr.dtype.element_ty))
        tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty))

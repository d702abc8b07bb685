"""Block logits of single tokens, from what pages keep (sketch.py).

The rule is docs/selection.md.  Logits are kept in base 2 (scaled by ``log2(e)``) throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek_kernels.paged.kernels.sketch_code import halves, rotate, scale_of
from sparsek_kernels.paged.kernels.tiles import TOP_K, page_of, tile_sees_all

_UNPACK = tl.constexpr(
    """
    shr.u32 $1, $2, 4;
    and.b32 $0, $2, 0x0F0F0F0F;
    and.b32 $1, $1, 0x0F0F0F0F;
    """
)


@triton.jit
def vector_positions(
    first_block, BLOCK_B: tl.constexpr, SEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    """Blocks and first positions of the vectors of ``BLOCK_B`` blocks, vectors of a rank together.

    Row ``n`` is block ``n % BLOCK_B``, vector ``n // BLOCK_B`` of it (the last one repeated up to a
    power of two): a maximum over vectors then stays within a thread.  Returns two ``[ROWS]``.
    """
    VECTORS: tl.constexpr = SEL_BLOCK // VECTOR
    ROWS: tl.constexpr = triton.next_power_of_2(VECTORS) * BLOCK_B
    rows = tl.arange(0, ROWS)
    block = first_block + rows % BLOCK_B
    vector = tl.minimum(rows // BLOCK_B, VECTORS - 1)
    return block, block * SEL_BLOCK + vector * VECTOR


@triton.jit
def vector_pages(
    table_ptr,
    first_block,
    end,
    BLOCK_B: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARDED: tl.constexpr,
):
    """Pages ``[ROWS]`` of the vectors of ``BLOCK_B`` blocks from ``first_block`` on, to ``end``.

    With ``SHARDED``, page 0 stands for the pages of other ranks.
    """
    block, position = vector_positions(first_block, BLOCK_B, SEL_BLOCK, VECTOR)
    page = tl.load(table_ptr + position // PAGE_SIZE, mask=block < end, other=0)
    return tl.maximum(page, 0) if SHARDED else page


@triton.jit
def checksum_weights(HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_M: tl.constexpr):
    """Weights of a row's bytes in its checksum, the same in every column.

    Returns ``[BLOCK_HALF, BLOCK_M]`` int8: a product with rows of bytes gives their checksums in
    the very layout of the logits.
    """
    offs = tl.arange(0, BLOCK_HALF)
    weight = tl.where(offs < HALF, 1 << (offs % 4), 0).to(tl.int8)
    return tl.broadcast_to(weight[:, None], [BLOCK_HALF, BLOCK_M])


@triton.jit
def quantise_query(q, HEAD_DIM: tl.constexpr, ROTATION: tl.constexpr):
    """Rows of ``q`` ``[BLOCK_M, BLOCK_D]`` rotated, as int8 with a scale per row.

    Returns the channels of both halves ``[BLOCK_D / 2, BLOCK_M]``, the scales ``[BLOCK_M]``, and
    how much levels from 0 to 15 give too much with each row, ``[BLOCK_M]`` float32.
    """
    x = rotate(q.to(tl.float32), ROTATION)
    scale = tl.max(tl.abs(x), axis=1) / 127.0
    x = tl.floor(x / tl.where(scale > 0.0, scale, 1.0)[:, None] + 0.5)
    excess = 7.5 * tl.sum(x, axis=1)
    low, high = halves(x, HEAD_DIM)
    inside = (tl.arange(0, low.shape[1]) < HEAD_DIM // 2)[None, :]
    low = tl.where(inside, low, 0.0).to(tl.int8)
    high = tl.where(inside, high, 0.0).to(tl.int8)
    return tl.trans(low), tl.trans(high), scale, excess


@triton.jit
def unpack_levels(packed, ASM: tl.constexpr):
    """Low and high halves of bytes, as two tiles of int8 from 0 to 15."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low = (packed & 15).to(tl.int8)
        high = (packed >> 4).to(tl.int8)
    return low, high


@triton.jit
def block_logits(
    q_low,
    q_high,
    excess,
    weights,
    summary_ptr,
    page,
    first_block,
    end,
    stride_sp,
    HALF: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ASM: tl.constexpr,
):
    """Logits of ``BLOCK_B`` blocks in units of the rows' scales: maximum over a block's vectors.

    q_low, q_high, excess: from :func:`quantise_query`; weights: from :func:`checksum_weights`;
    page: from :func:`vector_pages`.  Returns ``[BLOCK_B, BLOCK_M]`` float32; blocks from ``end`` on
    hold no meaning.
    """
    block, position = vector_positions(first_block, BLOCK_B, SEL_BLOCK, VECTOR)
    mask = block < end
    vector = (position % PAGE_SIZE) // VECTOR
    row = summary_ptr + page.to(tl.int64) * stride_sp + vector * HALF
    offs = tl.arange(0, q_low.shape[0])
    packed = tl.load(
        row[:, None] + offs[None, :],
        mask=mask[:, None] & (offs < HALF)[None, :],
        other=0,
    )  # [ROWS, BLOCK_D / 2]
    # As signed bytes, which leaves a sum modulo 256 as it is.
    code = tl.dot(packed.to(tl.int8, bitcast=True), weights, out_dtype=tl.int32) & 255
    low, high = unpack_levels(packed, ASM)
    sums = tl.dot(low, q_low, out_dtype=tl.int32)
    sums = tl.dot(high, q_high, sums, out_dtype=tl.int32)
    logits = (sums.to(tl.float32) - excess[None, :]) * scale_of(code)
    shaped = tl.reshape(logits, [logits.shape[0] // BLOCK_B, BLOCK_B, logits.shape[1]])
    return tl.max(shaped, axis=0)


@triton.jit(do_not_specialize=["table_width", "dense_below", "first_request"])
def decode_logits_kernel(
    logits_ptr,
    q_ptr,
    summary_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    qk_scale,
    table_width,
    dense_below,
    first_request,
    stride_lt,
    stride_lh,
    stride_qt,
    stride_qh,
    stride_sp,
    stride_sh,
    stride_br,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SINK_BLOCKS: tl.constexpr,
    REACH_BLOCKS: tl.constexpr,
    SCORED_BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ASM: tl.constexpr,
    SHARDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Logits of all decoded tokens of one request and one KV head, for a share of the blocks.

    A program takes every ``num_programs(0)``-th run of ``BLOCK_B`` blocks, so that the grid need
    not grow with the longest context allowed.  Row ``j * BLOCK_H + h`` of the tile is token ``j``,
    query head ``h`` of the group.  Writes ``[requests * QUERY_LEN, Hq, stride_lh]`` float32; blocks
    from a token's own on are left out, and so are those past a row's end.  With ``SHARDED``, blocks
    in pages of other ranks (-1 in the block table) get -inf.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.program_id(0) * BLOCK_B
    kv_head = tl.program_id(1)
    local_request = tl.program_id(2)
    request = first_request + local_request
    # looked up before the lengths are known: a load less to wait for, never followed past the end
    table = block_table_ptr + request.to(tl.int64) * stride_br
    table_blocks = (table_width * PAGE_SIZE) // SEL_BLOCK
    page = vector_pages(table, begin, table_blocks, BLOCK_B, PAGE_SIZE, SEL_BLOCK, VECTOR, SHARDED)
    seq_len = tl.load(seq_lens_ptr + request)
    first_token = tl.load(cu_seqlens_ptr + request)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1) - first_token
    num_blocks = tl.minimum((seq_len - 1) // SEL_BLOCK, stride_lh)
    if (begin >= num_blocks) | (num_tokens <= 0):
        return
    full = tile_sees_all(
        seq_len - 1, dense_below, TOP_K, 1, SEL_BLOCK, SINK_BLOCKS, REACH_BLOCKS, SCORED_BLOCKS
    )
    if full:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = offs_m // BLOCK_H
    member = offs_m % BLOCK_H
    mask_m = (token < num_tokens) & (member < GROUP)
    head = kv_head * GROUP + member
    q_row = (first_token + token).to(tl.int64) * stride_qt + head * stride_qh
    q = tl.load(
        q_ptr + q_row[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    q_low, q_high, q_scale, excess = quantise_query(q, HEAD_DIM, ROTATION)
    place = (local_request * QUERY_LEN + token).to(tl.int64)
    out = logits_ptr + (place * stride_lt + head * stride_lh)[None, :]
    summary = summary_ptr + kv_head.to(tl.int64) * stride_sh
    stride = tl.num_programs(0) * BLOCK_B
    HALF: tl.constexpr = HEAD_DIM // 2
    weights = checksum_weights(HALF, BLOCK_D // 2, BLOCK_M)
    for first in tl.range(begin, num_blocks, stride, num_stages=NUM_STAGES):
        next_page = vector_pages(
            table, first + stride, num_blocks, BLOCK_B, PAGE_SIZE, SEL_BLOCK, VECTOR, SHARDED
        )
        logits = block_logits(
            q_low,
            q_high,
            excess,
            weights,
            summary,
            page,
            first,
            num_blocks,
            stride_sp,
            HALF,
            BLOCK_B,
            PAGE_SIZE,
            SEL_BLOCK,
            VECTOR,
            ASM,
        )
        page = next_page
        offs_b = first + tl.arange(0, BLOCK_B)
        mask = mask_m[None, :] & (offs_b < num_blocks)[:, None]
        logits *= (q_scale * qk_scale)[None, :]
        if SHARDED:
            held = page_of(table, offs_b * SEL_BLOCK, offs_b < num_blocks, PAGE_SIZE) >= 0
            logits = tl.where(held[:, None], logits, float("-inf"))
        tl.store(out + offs_b[:, None], logits, mask=mask)

"""Attention of decoded tokens over compressed keys, which lie in pages.

A tile is one decoded token with all heads of a group.  Nothing is read back to the host.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_finish, softmax_init, softmax_step
from sparsek_kernels.common.kernels.split_kv import add_splits
from sparsek_kernels.nsa.kernels.tiles import compressed_visible
from sparsek_kernels.paged.kernels.tiles import tile_span


@triton.jit
def load_compressed(
    cmp_ptr, table_ptr,
    block, mask, offs_d,
    stride_cp, stride_cc,
    HEAD_DIM: tl.constexpr, PER_CMP: tl.constexpr, ROWS_PER_PAGE: tl.constexpr,
):  # fmt: skip
    """Compressed keys or values ``[BLOCK_N, BLOCK_D]`` of blocks ``block`` of one head.

    A block covers ``PER_CMP`` strides and lies in the row of the last of them.
    """
    row = block + PER_CMP - 1
    page = tl.load(table_ptr + row // ROWS_PER_PAGE, mask=mask, other=0).to(tl.int64)
    at = page * stride_cp + (row % ROWS_PER_PAGE) * stride_cc  # [BLOCK_N]
    inside = mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(cmp_ptr + at[:, None] + offs_d[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["splits"])
def nsa_paged_compressed_kernel(
    out_ptr, lse_ptr, start_ptr, part_ptr, state_ptr, ticket_ptr, q_ptr, k_ptr, v_ptr,
    block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    scale, splits,
    stride_ot, stride_oh,
    stride_qt, stride_qh,
    stride_kp, stride_kh, stride_kc,
    stride_vp, stride_vh, stride_vc,
    stride_br,
    TILES_PER_REQUEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, MOST_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: one decoded token and KV head, one share of the compressed blocks it sees.

    The program that draws a token's last ticket adds the shares up, in order, and writes ``out``
    and the natural ``lse [T, Hq]``.  ``start [T]`` gets the token's row of q minus its position.
    """
    PER_CMP: tl.constexpr = CMP_BLOCK // CMP_STRIDE
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request, _base, pos, high, token_of_zero = tile_span(
        tile, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    if high < pos:
        return
    token = (token_of_zero + pos).to(tl.int64)
    if (kv_head == 0) & (split == 0):
        tl.store(start_ptr + token, token_of_zero)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < GROUP
    mask_out = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    head = (kv_head * GROUP + offs_m).to(tl.int64)
    q_rows = token * stride_qt + head * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_out, other=0.0)

    seen = compressed_visible(pos, CMP_BLOCK, CMP_STRIDE)
    num_tiles = tl.cdiv(seen, BLOCK_N)
    if MOST_SPLITS == 1:
        splits = 1
    per_split = tl.cdiv(num_tiles, splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    table = block_table_ptr + request.to(tl.int64) * stride_br
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    scale_log2 = scale * LOG2E
    m, total = softmax_init(0.0, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for part in tl.range(begin, end, num_stages=NUM_STAGES):
        block = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        inside = block < seen
        k = load_compressed(
            k_head, table, block, inside, offs_d, stride_kp, stride_kc,
            HEAD_DIM, PER_CMP, ROWS_PER_PAGE,
        )  # fmt: skip
        v = load_compressed(
            v_head, table, block, inside, offs_d, stride_vp, stride_vc,
            HEAD_DIM, PER_CMP, ROWS_PER_PAGE,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        m, total, p, alpha = softmax_step(m, total, scores, scale_log2, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    if MOST_SPLITS > 1:
        place = (tile * NUM_KV_HEADS + kv_head).to(tl.int64)
        parts = part_ptr + place * splits * BLOCK_M * BLOCK_D
        parts += offs_m[:, None] * BLOCK_D + offs_d[None, :]
        states = state_ptr + place * splits * 2 * BLOCK_M + offs_m
        tl.store(states + (2 * split) * BLOCK_M, m, mask=mask_m)
        tl.store(states + (2 * split + 1) * BLOCK_M, total, mask=mask_m)
        if (begin < end) | (split == 0):
            tl.store(parts + split * BLOCK_M * BLOCK_D, acc, mask=mask_out)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel")
        if ticket != splits - 1:
            return
        tl.store(ticket_ptr + place, 0)
        m, total, acc = add_splits(
            parts, states, tl.maximum(tl.cdiv(num_tiles, tl.maximum(per_split, 1)), 1),
            BLOCK_M, BLOCK_D, MOST_SPLITS,
        )  # fmt: skip
    inv_l, lse = softmax_finish(m, total)
    out_rows = token * stride_ot + head * stride_oh
    tl.store(
        out_ptr + out_rows[:, None] + offs_d[None, :],
        (acc * inv_l[:, None]).to(out_ptr.dtype.element_ty),
        mask=mask_out,
    )
    tl.store(lse_ptr + token * NUM_KV_HEADS * GROUP + head, lse, mask=mask_m)

"""Selected and sliding attention of decoded tokens over pages, and the sum of compressed shares."""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_init, softmax_step
from sparsek_kernels.common.kernels.split_kv import add_splits
from sparsek_kernels.nsa.paged.kernels.attend_compressed import compressed_parts
from sparsek_kernels.paged.kernels.tiles import page_of, tile_span


@triton.jit
def _piece(
    piece, end, first, pos, is_window, chosen_ptr, table_ptr,
    SEL_BLOCK: tl.constexpr, TOP_N: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions of the keys of a piece, whether they are attended, and their pages ``[BLOCK_N]``.

    Entry ``i`` of the window is token ``first + i``, of the chosen blocks token ``i % SEL_BLOCK``
    of block ``i // SEL_BLOCK``.
    """
    entry = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    listed = (entry < TOP_N * SEL_BLOCK) & (piece < end) & (is_window == 0)
    block = tl.load(chosen_ptr + entry // SEL_BLOCK, mask=listed, other=-1)
    in_block = tl.where(block < 0, pos + 1, block * SEL_BLOCK + entry % SEL_BLOCK)
    token = tl.where(is_window, first + entry, in_block)
    there = (token <= pos) & (piece < end)
    return token, there, page_of(table_ptr, token, there, PAGE_SIZE)


@triton.jit
def _store_sum(
    out, parts, states, num_parts, stride_oh,
    GROUP: tl.constexpr, LIVE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Write the group's output, the sum of ``num_parts`` shares."""
    offs_h = tl.arange(0, LIVE)  # [LIVE]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    _top, total, acc = add_splits(
        parts + offs_h[:, None] * BLOCK_D + offs_d[None, :], states + offs_h, num_parts, LIVE,
        BLOCK_D, MOST,
    )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out + offs_h.to(tl.int64)[:, None] * stride_oh + offs_d[None, :],
        acc.to(out.dtype.element_ty),
        mask=(offs_h < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :],
    )


@triton.jit(
    do_not_specialize=[
        *("window_size", "first_tile", "cmp_splits", "window_splits", "selected_splits"),
    ]
)
def nsa_paged_attend_kernel(
    out_ptr, part_ptr, state_ptr, ticket_ptr, cmp_part_ptr, cmp_state_ptr, chosen_ptr, q_ptr,
    k_slc_ptr, v_slc_ptr, k_swa_ptr, v_swa_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    scale, window_size, first_tile, cmp_splits, window_splits, selected_splits,
    stride_ot, stride_ob, stride_oh,
    stride_qt, stride_qh,
    stride_ksp, stride_ksh, stride_kst,
    stride_vsp, stride_vsh, stride_vst,
    stride_kwp, stride_kwh, stride_kwt,
    stride_vwp, stride_vwh, stride_vwt,
    stride_br,
    TILES_PER_REQUEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr, SEL_BLOCK: tl.constexpr, TOP_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, MOST: tl.constexpr, MOST_CMP: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: one decoded token and KV head, a share of its window or of its chosen blocks.

    The program that draws a branch's last ticket adds its shares up, in order, into ``out [T, 3,
    Hq, D]``.  With ``MOST_CMP > 1`` one more program does that with those of compressed attention.

    With ``OVERLAP`` the kernel before this one chooses; windows are attended while it is at work.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    program = tl.program_id(2)
    is_window = program < window_splits
    request, _base, pos, high, token_of_zero = tile_span(
        first_tile + tile, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    if OVERLAP and (is_window == 0) | (high < pos):
        tl.extra.cuda.gdc_wait()
    if high < pos:
        return
    token = (token_of_zero + pos).to(tl.int64)
    pair = (tile * NUM_KV_HEADS + kv_head).to(tl.int64)
    out = out_ptr + token * stride_ot + (kv_head * GROUP).to(tl.int64) * stride_oh
    width = window_splits + selected_splits
    if MOST_CMP > 1 and program == width:
        _seen, _tiles, _per_split, num_parts = compressed_parts(
            pos, cmp_splits, CMP_BLOCK, CMP_STRIDE, TILE_KEYS
        )
        _store_sum(
            out, cmp_part_ptr + pair * cmp_splits * LIVE * BLOCK_D,
            cmp_state_ptr + pair * cmp_splits * 2 * LIVE, num_parts, stride_oh,
            GROUP, LIVE, HEAD_DIM, BLOCK_D, MOST_CMP,
        )  # fmt: skip
        return
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_m = offs_m < GROUP
    mask_d = offs_d < HEAD_DIM
    mask_out = mask_m[:, None] & mask_d[None, :]
    q_rows = token * stride_qt + (kv_head * GROUP + offs_m).to(tl.int64) * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_out, other=0.0)

    split = tl.where(is_window, program, program - window_splits)
    splits = tl.where(is_window, window_splits, selected_splits)
    first = tl.maximum(pos + 1 - window_size, 0)
    pieces = tl.cdiv(tl.where(is_window, pos + 1 - first, TOP_N * SEL_BLOCK), BLOCK_N)
    per_split = tl.cdiv(pieces, splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, pieces)
    table = block_table_ptr + request.to(tl.int64) * stride_br
    chosen = chosen_ptr + (token * NUM_KV_HEADS + kv_head) * TOP_N
    k_head = tl.where(is_window, k_swa_ptr, k_slc_ptr)
    v_head = tl.where(is_window, v_swa_ptr, v_slc_ptr)
    k_head += kv_head.to(tl.int64) * tl.where(is_window, stride_kwh, stride_ksh)
    v_head += kv_head.to(tl.int64) * tl.where(is_window, stride_vwh, stride_vsh)
    stride_kp = tl.where(is_window, stride_kwp, stride_ksp)
    stride_vp = tl.where(is_window, stride_vwp, stride_vsp)
    stride_kt = tl.where(is_window, stride_kwt, stride_kst)
    stride_vt = tl.where(is_window, stride_vwt, stride_vst)
    scale_log2 = scale * LOG2E
    m, total = softmax_init(0.0, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    key, there, page = _piece(
        begin, end, first, pos, is_window, chosen, table, SEL_BLOCK, TOP_N, PAGE_SIZE, BLOCK_N
    )
    for piece in tl.range(begin, end, num_stages=NUM_STAGES):
        # The next piece's pages are looked up now, so that its keys wait for no other load.
        next_key, next_there, next_page = _piece(
            piece + 1, end, first, pos, is_window, chosen, table, SEL_BLOCK, TOP_N, PAGE_SIZE,
            BLOCK_N,
        )  # fmt: skip
        k_rows = page * stride_kp + (key % PAGE_SIZE) * stride_kt  # [BLOCK_N]
        v_rows = page * stride_vp + (key % PAGE_SIZE) * stride_vt
        mask = there[:, None] & mask_d[None, :]
        k = tl.load(k_head + k_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        v = tl.load(v_head + v_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = tl.where(there[None, :], scores, float("-inf"))
        m, total, p, alpha = softmax_step(m, total, scores, scale_log2, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        key, there, page = next_key, next_there, next_page
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    own = pair * width + program
    states = state_ptr + own * 2 * LIVE + offs_m
    tl.store(states, m, mask=mask_m)
    tl.store(states + LIVE, total, mask=mask_m)
    if (begin < end) | (split == 0):
        parts = part_ptr + own * LIVE * BLOCK_D + offs_m[:, None] * BLOCK_D + offs_d[None, :]
        tl.store(parts, acc, mask=mask_out)
    tl.debug_barrier()
    branch = tl.where(is_window, 1, 0)
    ticket = tl.atomic_add(ticket_ptr + pair * 2 + branch, 1, sem="acq_rel")
    if ticket != splits - 1:
        return
    tl.store(ticket_ptr + pair * 2 + branch, 0)
    own -= split
    _store_sum(
        out + (branch + 1) * stride_ob, part_ptr + own * LIVE * BLOCK_D,
        state_ptr + own * 2 * LIVE, tl.maximum(tl.cdiv(pieces, tl.maximum(per_split, 1)), 1),
        stride_oh, GROUP, LIVE, HEAD_DIM, BLOCK_D, MOST,
    )  # fmt: skip

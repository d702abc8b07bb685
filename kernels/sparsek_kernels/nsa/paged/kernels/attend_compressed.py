"""Attention of decoded tokens over compressed keys, which lie in pages, and the best blocks.

A selection block scores the compressed-attention mass of the compressed blocks that touch it, as
in training (arXiv 2502.11089, equation 9).  Nothing is read back to the host.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_init, softmax_step
from sparsek_kernels.nsa.kernels.tiles import compressed_visible
from sparsek_kernels.nsa.select.kernels.topk import forced_blocks, store_best
from sparsek_kernels.paged.kernels.tiles import page_of, tile_span


@triton.jit
def compressed_parts(
    pos, splits,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """``(seen, num_tiles, per_split, num_parts)`` of a token's compressed blocks.

    ``splits`` programs share them, ``per_split`` tiles of ``TILE_KEYS`` each; the first
    ``num_parts`` of them store an output, at least one.
    """
    seen = compressed_visible(pos, CMP_BLOCK, CMP_STRIDE)
    num_tiles = tl.cdiv(seen, TILE_KEYS)
    per_split = tl.maximum(tl.cdiv(num_tiles, splits), 1)
    return seen, num_tiles, per_split, tl.maximum(tl.cdiv(num_tiles, per_split), 1)


@triton.jit
def _choose(
    out, pos, states, masses, weights, num_tiles, splits, most_tiles,
    GROUP: tl.constexpr, LIVE: tl.constexpr, PER_TILE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    TOP_N: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one token and KV head to ``out [TOP_N]``.

    ``states [splits, 2, LIVE]`` are maxima and sums.  ``masses [LIVE, 2, most_tiles + 1,
    PER_TILE]`` are those that blocks have from the strides in them, and from the block before
    them, both relative to ``weights [LIVE, most_tiles]`` of the tile that they come from, which
    are overwritten.
    """
    out, num_free, num_init, first_local = forced_blocks(
        out, pos, SEL_BLOCK, TOP_N, NUM_INIT, NUM_LOCAL, BLOCK_O
    )
    if num_free > 0:
        offs_h = tl.arange(0, LIVE)[:, None]
        offs_s = tl.arange(0, BLOCK_S)[None, :]
        state = states + 2 * offs_s * LIVE + offs_h
        m = tl.load(state, mask=offs_s < splits, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(state + LIVE, mask=offs_s < splits, other=0.0, cache_modifier=".cg")
        offs_t = tl.arange(0, BLOCK_T)
        known = (offs_t < num_tiles)[None, :] & (offs_h < GROUP)
        weight = weights + offs_h * most_tiles + offs_t[None, :]  # [LIVE, BLOCK_T]
        relative = tl.load(weight, mask=known, other=float("-inf"), cache_modifier=".cg")
        top = tl.max(m, 1)  # [LIVE]
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(total * tl.exp2(m - top[:, None]), 1)
        lse = top + tl.log2(tl.where(total > 0.0, total, 1.0))
        tl.debug_barrier()  # all have read what is overwritten
        tl.store(weight, tl.exp2(relative - lse[:, None]), mask=known)
        tl.debug_barrier()
        place = offs_t[:, None] * PER_TILE + tl.arange(0, PER_TILE)[None, :]  # [BLOCK_T, PER_TILE]
        known = place < first_local
        first = (tl.arange(0, PER_TILE) == 0)[None, :]
        score = tl.zeros([BLOCK_T, PER_TILE], tl.float32)
        TOGETHER: tl.constexpr = max(4096 // (BLOCK_T * PER_TILE), 1)  # heads whose loads are out
        for member in tl.range(0, GROUP, loop_unroll_factor=TOGETHER):
            mass = masses + member * 2 * (most_tiles + 1) * PER_TILE + place
            own = tl.load(mass, mask=known, other=0.0, cache_modifier=".cg")
            mass += (most_tiles + 1) * PER_TILE
            spilled = tl.load(mass, mask=known & (place > 0), other=0.0, cache_modifier=".cg")
            of_tile = weights + member * most_tiles + offs_t
            now = tl.load(of_tile, mask=offs_t < num_tiles, other=0.0)[:, None]
            before = tl.load(of_tile - 1, mask=(offs_t > 0) & (offs_t <= num_tiles), other=0.0)
            score += own * now + spilled * tl.where(first, before[:, None], now)
        FREE: tl.constexpr = TOP_N - NUM_INIT - NUM_LOCAL
        score = tl.reshape(score, [BLOCK_T * PER_TILE // 32, 32])
        store_best(out, score, num_free, num_init, first_local, FREE, BLOCK_O)


@triton.jit(do_not_specialize=["first_tile", "splits"])
def nsa_paged_compressed_kernel(
    chosen_ptr, out_ptr, part_ptr, state_ptr, mass_ptr, weight_ptr, ticket_ptr, q_ptr, k_ptr, v_ptr,
    block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    scale, first_tile, splits, most_tiles,
    stride_ot, stride_oh,
    stride_qt, stride_qh,
    stride_kp, stride_kh, stride_kc,
    stride_vp, stride_vh, stride_vc,
    stride_br,
    TILES_PER_REQUEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    SEL_BLOCK: tl.constexpr, TOP_N: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr, TILE_KEYS: tl.constexpr, LIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr, MOST_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: one decoded token and KV head, one share of the compressed blocks it sees.

    Tokens are those from tile ``first_tile`` on, ``TILES_PER_REQUEST`` tiles for each request.

    The program that draws a token's last ticket knows the log-sum-exps and chooses the token's
    blocks, ``chosen [T, Hkv, TOP_N]``.  With one split it has the output too; else the kernel that
    attends them adds the shares up.

    With ``OVERLAP`` the kernel before this one compresses the blocks that this step completes.
    What other steps stored is attended while it is at work.
    """
    PER_SEL: tl.constexpr = SEL_BLOCK // CMP_STRIDE
    PER_CMP: tl.constexpr = CMP_BLOCK // CMP_STRIDE
    PER_TILE: tl.constexpr = TILE_KEYS // PER_SEL
    WIDTH: tl.constexpr = BLOCK_N // PER_TILE  # columns of a selection block
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request, _base, pos, high, token_of_zero = tile_span(
        first_tile + tile, seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    if high < pos:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        return
    token = (token_of_zero + pos).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_b = tl.arange(0, PER_TILE)  # [PER_TILE]
    in_b = offs_n % WIDTH  # stride within its selection block
    offs_c = offs_n // WIDTH * PER_SEL + in_b  # compressed block of a tile
    mask_m = offs_m < GROUP
    mask_d = offs_d < HEAD_DIM
    mask_out = mask_m[:, None] & mask_d[None, :]
    head = (kv_head * GROUP + offs_m).to(tl.int64)
    q_rows = token * stride_qt + head * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_out, other=0.0)

    if MOST_SPLITS == 1:
        splits = 1
    seen, num_tiles, per_split, _parts = compressed_parts(
        pos, splits, CMP_BLOCK, CMP_STRIDE, TILE_KEYS
    )
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    stored = compressed_visible(
        pos - (first_tile + tile) % TILES_PER_REQUEST - 1, CMP_BLOCK, CMP_STRIDE
    )
    ready = tl.maximum(tl.minimum(stored // TILE_KEYS, end), begin)
    table = block_table_ptr + request.to(tl.int64) * stride_br
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    place = (tile * NUM_KV_HEADS + kv_head).to(tl.int64)
    masses = mass_ptr + place * LIVE * 2 * (most_tiles + 1) * PER_TILE
    weights = weight_ptr + place * LIVE * most_tiles
    # Strides that a compressed block has in the selection block where it begins.
    within = tl.minimum(PER_SEL - in_b, PER_CMP)
    scale_log2 = scale * LOG2E
    m, total = softmax_init(0.0, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for phase in range(2):
        first = tl.where(phase == 0, begin, ready)
        last = tl.where(phase == 0, ready, end)
        row = first * TILE_KEYS + offs_c + PER_CMP - 1  # of the stride in which a block ends
        page = page_of(table, row, (row - PER_CMP + 1 < seen) & (first < last), ROWS_PER_PAGE)
        if OVERLAP and phase == 1:
            tl.extra.cuda.gdc_wait()
        for part in tl.range(first, last, num_stages=NUM_STAGES):
            block = part * TILE_KEYS + offs_c  # [BLOCK_N]
            inside = (block < seen) & (in_b < PER_SEL)
            row = block + PER_CMP - 1
            # The next tile's pages are looked up now, so that its keys wait for no other load.
            more = (block + TILE_KEYS < seen) & (part + 1 < last)
            next_page = page_of(table, row + TILE_KEYS, more, ROWS_PER_PAGE)
            k_rows = page * stride_kp + (row % ROWS_PER_PAGE) * stride_kc
            v_rows = page * stride_vp + (row % ROWS_PER_PAGE) * stride_vc
            mask = inside[:, None] & mask_d[None, :]
            # Past the L1 cache: it may have read a line too early, for the other rows in it.
            k_rows = k_head + k_rows[:, None] + offs_d[None, :]
            v_rows = v_head + v_rows[:, None] + offs_d[None, :]
            k = tl.load(k_rows, mask=mask, other=0.0, cache_modifier=".cg")
            v = tl.load(v_rows, mask=mask, other=0.0, cache_modifier=".cg")
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            scores = tl.where(inside[None, :], scores, float("-inf"))
            m, total, p, alpha = softmax_step(m, total, scores, scale_log2, True)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            own = tl.reshape(p * within.to(tl.float32)[None, :], [BLOCK_M, PER_TILE, WIDTH])
            spilled = p * (PER_CMP - within).to(tl.float32)[None, :]
            mass = masses + offs_m[:, None] * 2 * (most_tiles + 1) * PER_TILE
            mass += (part * PER_TILE + offs_b)[None, :]  # [BLOCK_M, PER_TILE]
            tl.store(mass, tl.sum(own, 2), mask=mask_m[:, None])
            mass += (most_tiles + 1) * PER_TILE + 1  # what a block spills is the next one's
            spilled = tl.sum(tl.reshape(spilled, [BLOCK_M, PER_TILE, WIDTH]), 2)
            tl.store(mass, spilled, mask=mask_m[:, None])
            tl.store(weights + offs_m * most_tiles + part, m, mask=mask_m)
            page = next_page
    states = state_ptr + place * splits * 2 * LIVE + offs_m
    tl.store(states + (2 * split) * LIVE, m, mask=mask_m)
    tl.store(states + (2 * split + 1) * LIVE, total, mask=mask_m)
    if MOST_SPLITS > 1:
        if (begin < end) | (split == 0):
            mine = part_ptr + (place * splits + split) * LIVE * BLOCK_D
            tl.store(mine + offs_m[:, None] * BLOCK_D + offs_d[None, :], acc, mask=mask_out)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel")
        if ticket != splits - 1:
            return
        tl.store(ticket_ptr + place, 0)
    else:
        inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
        tl.store(
            out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_d[None, :],
            (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
            mask=mask_out,
        )
        tl.debug_barrier()
    _choose(
        chosen_ptr + (token * NUM_KV_HEADS + kv_head) * TOP_N, pos,
        state_ptr + place * splits * 2 * LIVE, masses, weights, num_tiles, splits, most_tiles,
        GROUP, LIVE, PER_TILE, SEL_BLOCK, TOP_N, NUM_INIT, NUM_LOCAL, MOST_SPLITS, BLOCK_T, BLOCK_O,
    )  # fmt: skip

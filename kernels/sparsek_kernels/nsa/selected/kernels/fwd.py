"""Attention inside chosen blocks, block-major: each program serves the queries of one block.

A query's softmax runs over S blocks.  Block by block, with ``lse_s`` the log-sum-exp of the scores
inside block ``s`` and ``o_s`` the attention output over that block alone,

    lse = log sum_s exp(lse_s),     out = sum_s exp(lse_s - lse) o_s

(split-softmax, as in flash decoding).  A block's K and V are read once for all the queries that
chose it, wherever they are; the parts are summed by a second kernel without atomics.

Blocks near a query, which are its own, the one before and the first of the sequence, have no parts:
neighbouring queries share them, so the second kernel attends to them itself.  All others lie in the
past as a whole and need no mask.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import softmax_init, softmax_step

# Whatever these numbers are, one compiled kernel serves.
SIZES = [
    *("first_key", "num_keys", "first_slot", "num_blocks", "num_q", "num_k", "offset"),
    "item_entries",
]
ROW_SIZES = ["first_row", "num_rows", "num_q", "num_k", "offset"]


@triton.jit
def locate_item(
    item_keys_ptr,
    item_offsets_ptr,
    entry_offsets_ptr,
    block_seq_ptr,
    cu_blocks_ptr,
    cu_seqlens_ptr,
    first_key,
    num_keys,
    num_blocks,
    num_kv_heads,
    offset,
    num_k,
    item_entries,
    VARLEN: tl.constexpr,
):
    """Which block, head, sequence and entries a program serves.

    Items ``item_offsets[first_key] ..`` belong to this launch, one per program.  Returns
    ``(live, kv_head, batch, k_start, k_len, first_token, entry, entry_end, shift)``: keys
    ``first_token ..`` of the sequence, entries ``entry .. entry_end - 1`` of the inverse index,
    and ``shift``, which turns a row of q into a position of the sequence.
    """
    item = tl.load(item_offsets_ptr + first_key) + tl.program_id(0)
    live = item < tl.load(item_offsets_ptr + first_key + num_keys)
    key = tl.load(item_keys_ptr + item, mask=live, other=0)
    begin = tl.load(entry_offsets_ptr + key)
    end = tl.load(entry_offsets_ptr + key + 1)
    entry = begin + (item - tl.load(item_offsets_ptr + key)) * item_entries
    entry_end = tl.minimum(entry + item_entries, end)
    kv_head = (key // num_blocks) % num_kv_heads
    block = key % num_blocks
    seq = tl.load(block_seq_ptr + block)
    local_block = block - tl.load(cu_blocks_ptr + seq)
    if VARLEN:
        k_start = tl.load(cu_seqlens_ptr + seq)
        k_len = tl.load(cu_seqlens_ptr + seq + 1) - k_start
        return live, kv_head, seq * 0, k_start, k_len, local_block, entry, entry_end, -k_start
    else:
        return live, kv_head, seq, seq * 0, num_k, local_block, entry, entry_end, offset


@triton.jit
def load_entries(
    entries_ptr,
    entry_rows_ptr,
    entry,
    entry_end,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """``(slot id, row of q, group member, mask)`` of ``BLOCK_E`` entries times ``BLOCK_G`` heads.

    A slot id numbers ``[B, N, Hkv, S]``.
    """
    offs_r = tl.arange(0, BLOCK_E * BLOCK_G)
    at = entry + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
    mask = (at < entry_end) & (member < GROUP)
    slot = tl.load(entries_ptr + at, mask=mask, other=0)  # [BLOCK_E * BLOCK_G]
    row = tl.load(entry_rows_ptr + at, mask=mask, other=0)
    return slot, row, member, mask


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_part_kernel(
    part_ptr,
    part_lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    item_keys_ptr,
    item_offsets_ptr,
    entries_ptr,
    entry_rows_ptr,
    entry_offsets_ptr,
    block_seq_ptr,
    cu_blocks_ptr,
    cu_seqlens_ptr,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    first_key,
    num_keys,
    first_slot,
    num_blocks,
    num_kv_heads,
    num_q,
    num_k,
    offset,
    item_entries,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: up to ``item_entries`` queries that chose one block, ``BLOCK_E`` at a time.

    Writes ``part[slot - first_slot, member]`` (head vectors) and the base-2 log-sum-exp.  No block
    is near to its queries.
    """
    live, kv_head, batch, k_start, k_len, block, entry, entry_end, _shift = locate_item(
        item_keys_ptr, item_offsets_ptr, entry_offsets_ptr, block_seq_ptr, cu_blocks_ptr,
        cu_seqlens_ptr, first_key, num_keys, num_blocks, num_kv_heads, offset, num_k, item_entries,
        VARLEN,
    )  # fmt: skip
    if not live:
        return
    wide_head = kv_head.to(tl.int64)
    batch = batch.to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < HEAD_DIM
    key_pos = block * SEL_BLOCK + offs_n  # [BLOCK_N]
    inside = (offs_n < SEL_BLOCK) & (key_pos < k_len)
    mask_k = inside[:, None] & mask_d[None, :]
    keys = (k_start + key_pos).to(tl.int64)[:, None]
    k_base = k_ptr + batch * stride_kb + wide_head * stride_kh
    k = tl.load(k_base + keys * stride_kt + offs_d[None, :] * stride_kd, mask=mask_k, other=0.0)
    v_base = v_ptr + batch * stride_vb + wide_head * stride_vh
    v = tl.load(v_base + keys * stride_vt + offs_d[None, :] * stride_vd, mask=mask_k, other=0.0)
    scale_log2 = scale * 1.4426950408889634
    slot, row, member, mask_r = load_entries(
        entries_ptr, entry_rows_ptr, entry, entry_end, GROUP, BLOCK_E, BLOCK_G
    )
    for start in tl.range(entry, entry_end, BLOCK_E, num_stages=NUM_STAGES):
        mask_q = mask_r[:, None] & mask_d[None, :]
        head = (kv_head * GROUP + member).to(tl.int64)
        q_row = batch * stride_qb + row.to(tl.int64) * stride_qt + head * stride_qh
        q = tl.load(
            q_ptr + q_row[:, None] + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0
        )  # [BLOCK_E * BLOCK_G, BLOCK_D]
        at = (slot - first_slot).to(tl.int64) * GROUP + member
        mask_now = mask_r
        # The next entries are known before their rows are asked for.
        slot, row, member, mask_r = load_entries(
            entries_ptr, entry_rows_ptr, start + BLOCK_E, entry_end, GROUP, BLOCK_E, BLOCK_G
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_E * BLOCK_G, BLOCK_N]
        if SEL_BLOCK < BLOCK_N:
            scores = tl.where((offs_n < SEL_BLOCK)[None, :], scores, float("-inf"))
        m = tl.max(scores, 1) * scale_log2  # [BLOCK_E * BLOCK_G]
        p = tl.exp2(scores * scale_log2 - m[:, None])
        denom = tl.sum(p, 1)  # [BLOCK_E * BLOCK_G]
        p = p * (1.0 / denom)[:, None]
        acc = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [BLOCK_E * BLOCK_G, BLOCK_D]
        part_ptrs = part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
        mask_out = mask_now[:, None] & mask_d[None, :]
        tl.store(part_ptrs, acc.to(part_ptr.dtype.element_ty), mask=mask_out)
        tl.store(part_lse_ptr + at, m + tl.log2(denom), mask=mask_now)


@triton.jit
def is_near(block, own):
    """Whether a query in block ``own`` has no part for ``block``, future blocks included."""
    return (block == 0) | (block >= own - 1)


@triton.jit(do_not_specialize=ROW_SIZES)
def nsa_selected_combine_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cmp_ptr,
    swa_ptr,
    gate_cmp_ptr,
    gate_slc_ptr,
    gate_swa_ptr,
    indices_ptr,
    cu_rows_ptr,
    cu_first_ptr,
    tiles_ptr,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    first_row,
    num_rows,
    num_q,
    num_k,
    offset,
    num_kv_heads,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
    VARLEN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    NEAR_STAGES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: ``BLOCK_T`` neighbouring tokens of one KV head; near blocks and parts together.

    Tokens are rows ``first_row ..`` of ``[B * N]``; ``out`` and ``lse`` are contiguous.  With
    several sequences ``tiles`` maps programs to (sequence, tile), ``cu_first`` holds the sequences'
    first rows and ``cu_rows`` the same clipped to this launch.  ``GATED``: the output is the gated
    sum of this branch and two others, contiguous like ``out``, and ``lse`` is not written.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    start = first_row
    end = first_row + num_rows
    batch = kv_head * 0
    k_start = 0
    k_len = num_k
    base_row = 0
    if MAPPED:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        if seq < 0:
            return
        start = tl.load(cu_rows_ptr + seq)
        end = tl.load(cu_rows_ptr + seq + 1)
        base_row = tl.load(cu_first_ptr + seq)
        if VARLEN:
            k_start = base_row
            k_len = tl.load(cu_first_ptr + seq + 1) - base_row
        else:
            batch = seq
    start += tile * BLOCK_T
    shift = offset - base_row
    wide_head = kv_head.to(tl.int64)
    offs_r = tl.arange(0, BLOCK_T * BLOCK_G)
    row = start + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
    mask_r = (row < end) & (member < GROUP)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < HEAD_DIM
    mask_q = mask_r[:, None] & mask_d[None, :]
    pos = row + shift
    own = pos // SEL_BLOCK
    wide_row = row.to(tl.int64)
    head = (kv_head * GROUP + member).to(tl.int64)
    offs_t = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    offs_s = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    choice = (offs_t.to(tl.int64) * num_kv_heads + kv_head) * SLOTS
    chosen_all = tl.load(
        indices_ptr + choice[:, None] + offs_s[None, :],
        mask=(offs_t < end)[:, None] & (offs_s < SLOTS)[None, :],
        other=-1,
    )  # [BLOCK_T, BLOCK_S]

    q_row = wide_row
    if not VARLEN:
        q_row = wide_row - base_row
    batch = batch.to(tl.int64)
    q_row = batch * stride_qb + q_row * stride_qt + head * stride_qh
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0)
    k_base = k_ptr + batch * stride_kb + wide_head * stride_kh
    v_base = v_ptr + batch * stride_vb + wide_head * stride_vh
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    scale_log2 = scale * 1.4426950408889634
    slot = ((wide_row - first_row) * num_kv_heads + kv_head) * SLOTS  # of this launch's parts
    chosen_ptrs = indices_ptr + (wide_row * num_kv_heads + kv_head) * SLOTS
    listed = tl.load(
        chosen_ptrs[:, None] + offs_s[None, :],
        mask=mask_r[:, None] & (offs_s < SLOTS)[None, :],
        other=-1,
    )  # [BLOCK_T * BLOCK_G, BLOCK_S]
    far_lse = tl.load(
        part_lse_ptr + (slot[:, None] + offs_s[None, :]) * GROUP + member[:, None],
        mask=(listed >= 0) & (is_near(listed, own[:, None]) == 0),
        other=float("-inf"),
    )  # [BLOCK_T * BLOCK_G, BLOCK_S]
    # The softmax over near blocks starts from the parts' maximum, so the parts need no rescaling.
    _, total = softmax_init(0.0, BLOCK_T * BLOCK_G, False)
    m = tl.max(far_lse, 1)
    acc = tl.zeros([BLOCK_T * BLOCK_G, BLOCK_D], dtype=tl.float32)
    low = tl.maximum((start + shift) // SEL_BLOCK - 1, 0)
    high = (tl.minimum(start + BLOCK_T, end) - 1 + shift) // SEL_BLOCK
    # The first block, then those from low to high.
    for step in tl.range(tl.where(low > 0, 0, 1), high - low + 2, num_stages=NEAR_STAGES):
        block = tl.where(step == 0, 0, low + step - 1)
        holds = tl.max((chosen_all == block).to(tl.int32), 1)  # [BLOCK_T]
        holds = tl.broadcast_to(holds[:, None], [BLOCK_T, BLOCK_G])
        holds = (tl.reshape(holds, [BLOCK_T * BLOCK_G]) > 0) & is_near(block, own)
        key = block * SEL_BLOCK + offs_n  # [BLOCK_N]
        inside = (offs_n < SEL_BLOCK) & (key < k_len)
        mask_k = inside[:, None] & mask_d[None, :]
        at = (k_start + key).to(tl.int64)[:, None]
        k = tl.load(k_base + at * stride_kt + offs_d[None, :] * stride_kd, mask=mask_k, other=0.0)
        v = tl.load(v_base + at * stride_vt + offs_d[None, :] * stride_vd, mask=mask_k, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        seen = inside[None, :] & holds[:, None] & (key[None, :] <= pos[:, None])
        scores = tl.where(seen, scores, float("-inf"))  # [BLOCK_T * BLOCK_G, BLOCK_N]
        m, total, p, alpha = softmax_step(m, total, scores, scale_log2, True)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    m_ref = tl.where(m == float("-inf"), 0.0, m)
    weights = tl.exp2(far_lse - m_ref[:, None])  # [BLOCK_T * BLOCK_G, BLOCK_S]
    total += tl.sum(weights, 1)
    for s in tl.range(SLOTS, num_stages=NUM_STAGES):
        weight = tl.sum(tl.where((offs_s == s)[None, :], weights, 0.0), 1)
        part_ptrs = part_ptr + ((slot + s) * GROUP + member)[:, None] * HEAD_DIM + offs_d[None, :]
        part = tl.load(part_ptrs, mask=(weight > 0.0)[:, None] & mask_d[None, :], other=0.0)
        acc += part.to(tl.float32) * weight[:, None]
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    flat = wide_row * num_kv_heads * GROUP + head
    at = flat[:, None] * HEAD_DIM + offs_d[None, :]
    if GATED:
        acc *= tl.load(gate_slc_ptr + flat, mask=mask_r, other=0.0).to(tl.float32)[:, None]
        gate = tl.load(gate_cmp_ptr + flat, mask=mask_r, other=0.0).to(tl.float32)
        acc += tl.load(cmp_ptr + at, mask=mask_q, other=0.0).to(tl.float32) * gate[:, None]
        gate = tl.load(gate_swa_ptr + flat, mask=mask_r, other=0.0).to(tl.float32)
        acc += tl.load(swa_ptr + at, mask=mask_q, other=0.0).to(tl.float32) * gate[:, None]
    else:
        lse = tl.where(total > 0.0, (m_ref + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        stat = (wide_row // num_q * num_kv_heads * GROUP + head) * num_q + wide_row % num_q
        tl.store(lse_ptr + stat, lse, mask=mask_r)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask_q)

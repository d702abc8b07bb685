"""Attention inside chosen blocks, block-major: each program serves the queries of one block.

A query's softmax runs over S blocks.  Block by block, with ``lse_s`` the log-sum-exp of the scores
inside block ``s`` and ``o_s`` the attention output over that block alone,

    lse = log sum_s exp(lse_s),     out = sum_s exp(lse_s - lse) o_s

(split-softmax, as in flash decoding).  A block's K and V are read once for all the queries that
chose it, wherever they are; the parts are summed by a second kernel without atomics.
"""

import triton
import triton.language as tl


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
    ITEM: tl.constexpr,
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
    entry = begin + (item - tl.load(item_offsets_ptr + key)) * ITEM
    entry_end = tl.minimum(entry + ITEM, end)
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
    entry,
    entry_end,
    num_q,
    num_kv_heads,
    SLOTS: tl.constexpr,
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
    row = slot // (num_kv_heads * SLOTS) % num_q
    return slot, row, member, mask


@triton.jit
def nsa_selected_part_kernel(
    part_ptr,
    part_lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    item_keys_ptr,
    item_offsets_ptr,
    entries_ptr,
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
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: up to ``ITEM`` queries that chose one block, ``BLOCK_E`` of them at a time.

    Writes ``part[slot - first_slot, member]`` (head vectors) and the base-2 log-sum-exp.
    """
    live, kv_head, batch, k_start, k_len, block, entry, entry_end, shift = locate_item(
        item_keys_ptr, item_offsets_ptr, entry_offsets_ptr, block_seq_ptr, cu_blocks_ptr,
        cu_seqlens_ptr, first_key, num_keys, num_blocks, num_kv_heads, offset, num_k, ITEM, VARLEN,
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
    for start in tl.range(entry, entry_end, BLOCK_E, num_stages=NUM_STAGES):
        slot, row, member, mask_r = load_entries(
            entries_ptr, start, entry_end, num_q, num_kv_heads, SLOTS, GROUP, BLOCK_E, BLOCK_G
        )
        mask_q = mask_r[:, None] & mask_d[None, :]
        head = (kv_head * GROUP + member).to(tl.int64)
        q_row = batch * stride_qb + row.to(tl.int64) * stride_qt + head * stride_qh
        q = tl.load(
            q_ptr + q_row[:, None] + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0
        )  # [BLOCK_E * BLOCK_G, BLOCK_D]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        seen = inside[None, :] & (key_pos[None, :] <= (row + shift)[:, None])
        scores = tl.where(seen, scores, float("-inf"))  # [BLOCK_E * BLOCK_G, BLOCK_N]
        m = tl.max(scores, 1)  # [BLOCK_E * BLOCK_G]
        m_ref = tl.where(m == float("-inf"), 0.0, m)
        p = tl.exp2(scores - m_ref[:, None])
        denom = tl.sum(p, 1)  # [BLOCK_E * BLOCK_G]
        acc = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [BLOCK_E * BLOCK_G, BLOCK_D]
        acc = acc * (1.0 / tl.where(denom > 0.0, denom, 1.0))[:, None]
        lse = tl.where(denom > 0.0, m_ref + tl.log2(denom), float("-inf"))
        at = (slot - first_slot).to(tl.int64) * GROUP + member
        part_ptrs = part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(part_ptrs, acc.to(part_ptr.dtype.element_ty), mask=mask_q)
        tl.store(part_lse_ptr + at, lse, mask=mask_r)


@triton.jit
def nsa_selected_combine_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    indices_ptr,
    first_row,
    num_rows,
    num_q,
    num_kv_heads,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the parts of ``BLOCK_T`` tokens of one KV head become outputs.

    Tokens are rows ``first_row ..`` of ``[B * N]``; ``out`` and ``lse`` are contiguous.
    """
    kv_head = tl.program_id(1)
    offs_r = tl.arange(0, BLOCK_T * BLOCK_G)
    local = tl.program_id(0) * BLOCK_T + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
    mask_r = (local < num_rows) & (member < GROUP)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_q = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    wide = local.to(tl.int64)
    slot = (wide * num_kv_heads + kv_head) * SLOTS  # slots of this launch's parts
    chosen_ptrs = indices_ptr + ((wide + first_row) * num_kv_heads + kv_head) * SLOTS
    m = tl.full([BLOCK_T * BLOCK_G], float("-inf"), dtype=tl.float32)
    for s in range(SLOTS):
        chosen = tl.load(chosen_ptrs + s, mask=mask_r, other=-1)
        at = (slot + s) * GROUP + member
        part_lse = tl.load(part_lse_ptr + at, mask=mask_r & (chosen >= 0), other=float("-inf"))
        m = tl.maximum(m, part_lse)
    m_ref = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([BLOCK_T * BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_T * BLOCK_G, BLOCK_D], dtype=tl.float32)
    for s in tl.range(SLOTS, num_stages=4):
        chosen = tl.load(chosen_ptrs + s, mask=mask_r, other=-1)
        at = (slot + s) * GROUP + member
        part_lse = tl.load(part_lse_ptr + at, mask=mask_r & (chosen >= 0), other=float("-inf"))
        weight = tl.exp2(part_lse - m_ref)
        total += weight
        part_ptrs = part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
        part = tl.load(part_ptrs, mask=mask_q & (chosen >= 0)[:, None], other=0.0)
        acc += part.to(tl.float32) * weight[:, None]
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    lse = tl.where(total > 0.0, (m_ref + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    row = wide + first_row
    head = kv_head * GROUP + member
    out_ptrs = out_ptr + (row * num_kv_heads * GROUP + head)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_q)
    stat = (row // num_q * num_kv_heads * GROUP + head) * num_q + row % num_q
    tl.store(lse_ptr + stat, lse, mask=mask_r)

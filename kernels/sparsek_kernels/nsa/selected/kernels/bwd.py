"""Attention inside chosen blocks, backward, block-major and without atomics.

With ``p = exp(s - lse)`` and ``delta = sum_d out dout - dlse``, for the queries ``t`` that chose a
block with keys ``j``:

    dv_j = sum_t p dout_t,   ds = p (dout_t . v_j - delta_t),   dk_j = scale sum_t ds q_t,
    dq_t = scale sum over t's blocks of sum_j ds k_j

A program writes dk and dv of its share of a block's queries, and each of those queries' part of
dq; the parts are summed by kernels of their own.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.selected.kernels.items import (
    SIZES,
    first_item,
    load_entries,
    locate_block,
    locate_item,
)


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_bwd_part_kernel(
    dk_part_ptr, dv_part_ptr, dq_part_ptr, dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,
    item_keys_ptr, entries_ptr, entry_rows_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr,
    scale,
    stride_gb, stride_gt, stride_gh, stride_gd,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    first_key, num_keys, first_slot, num_blocks, num_kv_heads, num_q, num_k, offset, item_entries,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: up to ``item_entries`` queries that chose one block, ``BLOCK_E`` at a time.

    Writes fp32 ``dk_part`` and ``dv_part [items, BLOCK_N, D]``, and ``dq_part[slot - first_slot,
    member]`` in its own dtype, unscaled.
    """
    live, kv_head, batch, k_start, k_len, block, _begin, entry, entry_end, shift = locate_item(
        item_keys_ptr, entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr, first_key, num_keys,
        num_blocks, num_kv_heads, offset, num_k, item_entries, SEL_BLOCK, VARLEN,
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
    scale_log2 = scale * LOG2E
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)  # [BLOCK_N, BLOCK_D]
    slot, row, member, mask_r = load_entries(
        entries_ptr, entry_rows_ptr, entry, entry_end, GROUP, BLOCK_E, BLOCK_G
    )
    for start in tl.range(entry, entry_end, BLOCK_E, num_stages=NUM_STAGES):
        mask_q = mask_r[:, None] & mask_d[None, :]
        head = (kv_head * GROUP + member).to(tl.int64)
        wide_row = row.to(tl.int64)
        q_row = batch * stride_qb + wide_row * stride_qt + head * stride_qh
        q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0)
        g_row = batch * stride_gb + wide_row * stride_gt + head * stride_gh
        dout = tl.load(
            dout_ptr + g_row[:, None] + offs_d[None, :] * stride_gd, mask=mask_q, other=0.0
        )  # [BLOCK_E * BLOCK_G, BLOCK_D]
        stat = (batch * num_kv_heads * GROUP + head) * num_q + wide_row
        lse = tl.load(lse_ptr + stat, mask=mask_r, other=float("inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
        delta = tl.load(delta_ptr + stat, mask=mask_r, other=0.0)
        pos = row + shift
        at = (slot - first_slot).to(tl.int64) * GROUP + member
        # The next entries are known before their rows are asked for.
        slot, row, member, mask_r = load_entries(
            entries_ptr, entry_rows_ptr, start + BLOCK_E, entry_end, GROUP, BLOCK_E, BLOCK_G
        )
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, rows]
        seen = inside[:, None] & (key_pos[:, None] <= pos[None, :])
        p = tl.where(seen, tl.exp2(scores * scale_log2 - lse[None, :]), 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [BLOCK_N, rows]
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)  # [rows, BLOCK_D]
        dq_ptrs = dq_part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(dq_ptrs, dq.to(dq_part_ptr.dtype.element_ty), mask=mask_q)
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + offs_n
    part = at[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(dk_part_ptr + part, dk * scale, mask=mask_d[None, :] & (offs_n >= 0)[:, None])
    tl.store(dv_part_ptr + part, dv, mask=mask_d[None, :] & (offs_n >= 0)[:, None])


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_q"])
def nsa_selected_bwd_dq_kernel(
    dq_ptr, dq_part_ptr, dq_acc_ptr, indices_ptr,
    scale, first_row, num_rows, num_q, num_kv_heads,
    GROUP: tl.constexpr, TOP_N: tl.constexpr, HEAD_DIM: tl.constexpr, ADDED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: ``dq`` of ``BLOCK_T`` tokens of one KV head, the sum of their parts.

    ``ADDED``: ``dq_acc [B, Hq, N, D]`` is added to the sum.
    """
    kv_head = tl.program_id(1)
    offs_r = tl.arange(0, BLOCK_T * BLOCK_G)
    local = tl.program_id(0) * BLOCK_T + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
    mask_r = (local < num_rows) & (member < GROUP)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_q = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    wide = local.to(tl.int64)
    slot = (wide * num_kv_heads + kv_head) * TOP_N
    chosen_ptrs = indices_ptr + ((wide + first_row) * num_kv_heads + kv_head) * TOP_N
    head = kv_head * GROUP + member
    acc = tl.zeros([BLOCK_T * BLOCK_G, BLOCK_D], dtype=tl.float32)
    if ADDED:
        row = wide + first_row
        acc_row = (row // num_q * num_kv_heads * GROUP + head) * num_q + row % num_q
        acc_ptrs = dq_acc_ptr + acc_row[:, None] * HEAD_DIM + offs_d[None, :]
        acc = tl.load(acc_ptrs, mask=mask_q, other=0.0)  # [BLOCK_T * BLOCK_G, BLOCK_D]
    for s in tl.range(TOP_N, num_stages=4):
        chosen = tl.load(chosen_ptrs + s, mask=mask_r, other=-1)
        at = (slot + s) * GROUP + member
        part_ptrs = dq_part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
        part = tl.load(part_ptrs, mask=mask_q & (chosen >= 0)[:, None], other=0.0)
        acc += part.to(tl.float32)
    at = (wide + first_row) * num_kv_heads * GROUP + head
    dq_ptrs = dq_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(dq_ptrs, (acc * scale).to(dq_ptr.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["first_key", "num_blocks", "num_k", "item_entries"])
def nsa_selected_bwd_dkdv_kernel(
    dk_ptr, dv_ptr, dk_sum_ptr, dv_sum_ptr, dk_part_ptr, dv_part_ptr, entry_offsets_ptr,
    block_seq_ptr, cu_seqlens_ptr,
    first_key, num_blocks, num_kv_heads, num_k, item_entries,
    HEAD_DIM: tl.constexpr, SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program adds one block's parts of a launch to fp32 ``dk_sum`` and ``dv_sum``.

    All are ``[B, M, Hkv, D]``.  The ``FIRST`` launch begins the sums, the ``LAST`` one writes them
    to ``dk`` and ``dv`` instead.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    key = first_key + kv_head * num_blocks + block
    base = first_item(tl.load(entry_offsets_ptr + first_key), first_key, item_entries)
    begin = tl.load(entry_offsets_ptr + key)
    items = tl.cdiv(tl.load(entry_offsets_ptr + key + 1) - begin, item_entries)
    if not (FIRST or LAST) and items == 0:
        return
    seq, local, k_start, k_len = locate_block(
        block, block_seq_ptr, cu_seqlens_ptr, num_k, SEL_BLOCK, VARLEN
    )
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    key_pos = local * SEL_BLOCK + offs_n
    token = (k_start + key_pos).to(tl.int64)
    if not VARLEN:
        token += seq.to(tl.int64) * num_k
    mask_d = (offs_d < HEAD_DIM)[None, :]
    mask = ((offs_n < SEL_BLOCK) & (key_pos < k_len))[:, None] & mask_d
    at = (token * num_kv_heads + kv_head)[:, None] * HEAD_DIM + offs_d[None, :]
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    if not FIRST:
        dk = tl.load(dk_sum_ptr + at, mask=mask, other=0.0)
        dv = tl.load(dv_sum_ptr + at, mask=mask, other=0.0)
    row = (first_item(begin, key, item_entries) - base).to(tl.int64) * BLOCK_N + offs_n
    for _ in range(items):
        part = row[:, None] * HEAD_DIM + offs_d[None, :]
        dk += tl.load(dk_part_ptr + part, mask=mask, other=0.0)
        dv += tl.load(dv_part_ptr + part, mask=mask, other=0.0)
        row += BLOCK_N
    dk_out = dk_sum_ptr + at
    dv_out = dv_sum_ptr + at
    if LAST:
        dk_out = dk_ptr + at
        dv_out = dv_ptr + at
    tl.store(dk_out, dk.to(dk_out.dtype.element_ty), mask=mask)
    tl.store(dv_out, dv.to(dv_out.dtype.element_ty), mask=mask)

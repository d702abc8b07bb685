"""Parts of selected attention, block-major: each program serves the queries that chose one block.

A query's softmax runs over S blocks.  Block by block, with ``lse_s`` the log-sum-exp of the scores
inside block ``s`` and ``o_s`` the attention output over that block alone,

    lse = log sum_s exp(lse_s),     out = sum_s exp(lse_s - lse) o_s

(split-softmax, as in flash decoding).  A block's K and V are read once for all the queries that
chose it, wherever they are; the combining kernel sums the parts ``o_s`` without atomics.

Blocks near a query, which are its own, the one before and the first of the sequence, have no parts:
neighbouring queries share them, so the combining kernel attends to them itself.  All others lie in
the past as a whole and need no mask.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.selected.kernels.items import SIZES, load_entries, locate_item


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_part_kernel(
    part_ptr, part_lse_ptr, q_ptr, k_ptr, v_ptr, item_keys_ptr, entries_ptr, entry_rows_ptr,
    entry_offsets_ptr, block_seq_ptr, cu_seqlens_ptr,
    scale,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    first_key, num_keys, first_slot, num_blocks, num_kv_heads, num_q, num_k, offset, item_entries,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SEL_BLOCK: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: up to ``item_entries`` queries that chose one block, ``BLOCK_E`` at a time.

    Writes ``part[slot - first_slot, member]`` (head vectors) and the base-2 log-sum-exp.  No block
    is near to its queries.
    """
    live, kv_head, batch, k_start, k_len, block, _begin, entry, entry_end, _shift = locate_item(
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

"""Attention inside chosen blocks, token-major: neighbouring tokens share the union of their blocks.

For few tokens (decoding, short prompts), where turning the selection inside out costs more than
it saves.  Online softmax as in FlashAttention-2 (arXiv 2307.08691, algorithm 1).
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E, softmax_finish, softmax_init, softmax_step


@triton.jit
def nsa_selected_tokens_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, indices_ptr, cu_seqlens_ptr, tiles_ptr,
    scale,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    num_q, num_k, offset, num_kv_heads,
    GROUP: tl.constexpr, TOP_N: tl.constexpr, HEAD_DIM: tl.constexpr, SEL_BLOCK: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_T`` neighbouring tokens of one KV head, all heads of the group.

    Walks the union of the tokens' blocks in ascending order; a row counts a block's scores only
    if its token chose the block.  ``out``, ``lse`` and ``indices`` are contiguous.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    q_start = seq * 0
    k_start = seq * 0
    batch = seq
    q_len = num_q
    k_len = num_k
    if VARLEN:
        seq = tl.load(tiles_ptr + tile.to(tl.int64) * 2)
        tile = tl.load(tiles_ptr + tile.to(tl.int64) * 2 + 1)
        if seq < 0:
            return
        q_start = tl.load(cu_seqlens_ptr + seq)
        k_start = q_start
        q_len = tl.load(cu_seqlens_ptr + seq + 1) - q_start
        k_len = q_len
        batch = seq * 0
    batch = batch.to(tl.int64)
    wide_head = kv_head.to(tl.int64)
    offs_t = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    offs_s = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    choice_row = ((batch * num_q + q_start + offs_t) * num_kv_heads + kv_head) * TOP_N
    chosen = tl.load(
        indices_ptr + choice_row[:, None] + offs_s[None, :],
        mask=(offs_t < q_len)[:, None] & (offs_s < TOP_N)[None, :],
        other=-1,
    )  # [BLOCK_T, BLOCK_S]
    chosen = tl.where(chosen < 0, 0x7FFFFFFF, chosen)

    offs_r = tl.arange(0, BLOCK_T * BLOCK_G)
    local = tile * BLOCK_T + offs_r // BLOCK_G
    member = offs_r % BLOCK_G
    mask_r = (local < q_len) & (member < GROUP)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < HEAD_DIM
    mask_q = mask_r[:, None] & mask_d[None, :]
    rows = (q_start + local).to(tl.int64)
    head = (kv_head * GROUP + member).to(tl.int64)
    q_row = batch * stride_qb + rows * stride_qt + head * stride_qh
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :] * stride_qd, mask=mask_q, other=0.0)

    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k_base = k_ptr + batch * stride_kb + wide_head * stride_kh
    v_base = v_ptr + batch * stride_vb + wide_head * stride_vh
    pos = local + offset
    scale_log2 = scale * LOG2E
    m, denom = softmax_init(0.0, BLOCK_T * BLOCK_G, False)
    acc = tl.zeros([BLOCK_T * BLOCK_G, BLOCK_D], dtype=tl.float32)
    block = tl.min(chosen)
    while block < 0x7FFFFFFF:
        holds = tl.max((chosen == block).to(tl.int32), 1)  # [BLOCK_T]
        holds = tl.broadcast_to(holds[:, None], [BLOCK_T, BLOCK_G])
        holds = tl.reshape(holds, [BLOCK_T * BLOCK_G]) > 0
        key = block * SEL_BLOCK + offs_n  # [BLOCK_N]
        inside = (offs_n < SEL_BLOCK) & (key < k_len)
        mask_k = inside[:, None] & mask_d[None, :]
        at = (k_start + key).to(tl.int64)[:, None]
        k = tl.load(k_base + at * stride_kt + offs_d[None, :] * stride_kd, mask=mask_k, other=0.0)
        v = tl.load(v_base + at * stride_vt + offs_d[None, :] * stride_vd, mask=mask_k, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        seen = inside[None, :] & holds[:, None] & (key[None, :] <= pos[:, None])
        scores = tl.where(seen, scores, float("-inf"))  # [BLOCK_T * BLOCK_G, BLOCK_N]
        m, denom, p, alpha = softmax_step(m, denom, scores, scale_log2, True)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        block = tl.min(tl.where(chosen > block, chosen, 0x7FFFFFFF))
    inv_l, lse = softmax_finish(m, denom)
    out_row = (batch * num_q + rows) * num_kv_heads * GROUP + head
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptrs, (acc * inv_l[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)
    stat = (batch * num_kv_heads * GROUP + head) * num_q + rows
    tl.store(lse_ptr + stat, lse, mask=mask_r)

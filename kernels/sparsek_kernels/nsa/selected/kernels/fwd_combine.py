"""Selected attention from its parts, token-major: near blocks are attended here, far ones added.

Near blocks of a query are its own, the one before and the first of the sequence; every other block
that it chose has a part (``fwd_parts.py``), which enters with its share of the softmax.
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LN2, LOG2E, softmax_init, softmax_step

# Whatever these numbers are, one compiled kernel serves.
ROW_SIZES = ["first_row", "num_rows", "num_q", "num_k", "offset"]


@triton.jit
def is_near(block, own):
    """Whether a query in block ``own`` has no part for ``block``, future blocks included."""
    return (block == 0) | (block >= own - 1)


@triton.jit(do_not_specialize=ROW_SIZES)
def nsa_selected_combine_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, q_ptr, k_ptr, v_ptr, cmp_ptr, swa_ptr, gate_cmp_ptr,
    gate_slc_ptr, gate_swa_ptr, indices_ptr, cu_rows_ptr, cu_first_ptr, tiles_ptr,
    scale,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    first_row, num_rows, num_q, num_k, offset, num_kv_heads,
    GROUP: tl.constexpr, TOP_N: tl.constexpr, HEAD_DIM: tl.constexpr, SEL_BLOCK: tl.constexpr,
    MAPPED: tl.constexpr, VARLEN: tl.constexpr, GATED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
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
    choice = (offs_t.to(tl.int64) * num_kv_heads + kv_head) * TOP_N
    chosen_all = tl.load(
        indices_ptr + choice[:, None] + offs_s[None, :],
        mask=(offs_t < end)[:, None] & (offs_s < TOP_N)[None, :],
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
    scale_log2 = scale * LOG2E
    slot = ((wide_row - first_row) * num_kv_heads + kv_head) * TOP_N  # of this launch's parts
    chosen_ptrs = indices_ptr + (wide_row * num_kv_heads + kv_head) * TOP_N
    listed = tl.load(
        chosen_ptrs[:, None] + offs_s[None, :],
        mask=mask_r[:, None] & (offs_s < TOP_N)[None, :],
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
    for step in tl.range(tl.where(low > 0, 0, 1), high - low + 2, num_stages=2):
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
    for s in tl.range(TOP_N, num_stages=NUM_STAGES):
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
        lse = tl.where(total > 0.0, (m_ref + tl.log2(total)) * LN2, float("-inf"))
        stat = (wide_row // num_q * num_kv_heads * GROUP + head) * num_q + wide_row % num_q
        tl.store(lse_ptr + stat, lse, mask=mask_r)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask_q)

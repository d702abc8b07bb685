"""Scores of selection blocks for decoded tokens, from compressed keys that lie in pages.

A selection block scores the compressed-attention mass of the compressed blocks that touch it, as
in training (arXiv 2502.11089, equation 9).
"""

import triton
import triton.language as tl

from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.nsa.kernels.tiles import compressed_visible
from sparsek_kernels.nsa.paged.kernels.attend_compressed import load_compressed
from sparsek_kernels.paged.kernels.tiles import tile_span


@triton.jit
def nsa_paged_scores_kernel(
    scores_ptr, q_ptr, k_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    scale,
    stride_qt, stride_qh,
    stride_kp, stride_kh, stride_kc,
    stride_br,
    pitch,
    TILES_PER_REQUEST: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr, ROWS_PER_PAGE: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` selection blocks for one decoded token and KV head.

    Writes fp32 ``scores [T, Hkv, pitch]`` for blocks before the ``NUM_LOCAL`` latest: the
    compressed-attention mass of the ``BLOCK_C`` compressed blocks that touch them, each counted as
    often as the strides that they share.
    """
    PER_SEL: tl.constexpr = SEL_BLOCK // CMP_STRIDE
    PER_CMP: tl.constexpr = CMP_BLOCK // CMP_STRIDE
    kv_head = tl.program_id(1)
    request, _base, pos, high, token_of_zero = tile_span(
        tl.program_id(0), seq_lens_ptr, seq_lens_ptr, cu_seqlens_ptr, False, TILES_PER_REQUEST, 1
    )
    first = tl.program_id(2) * BLOCKS
    end = tl.minimum(pos // SEL_BLOCK - NUM_LOCAL + 1, pitch)
    if (high < pos) | (first >= end):
        return
    token = (token_of_zero + pos).to(tl.int64)
    offs_g = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_g = offs_g < GROUP
    head = (kv_head * GROUP + offs_g).to(tl.int64)
    q = tl.load(
        q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :],
        mask=mask_g[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_G, BLOCK_D]
    row = token * tl.num_programs(1) * GROUP + head
    lse = tl.load(lse_ptr + row, mask=mask_g, other=float("inf"))  # [BLOCK_G]
    block = first * PER_SEL - (PER_CMP - 1) + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    inside = (block >= 0) & (block < compressed_visible(pos, CMP_BLOCK, CMP_STRIDE))
    k = load_compressed(
        k_ptr + kv_head.to(tl.int64) * stride_kh,
        block_table_ptr + request.to(tl.int64) * stride_br,
        block, inside, offs_d, stride_kp, stride_kc, HEAD_DIM, PER_CMP, ROWS_PER_PAGE,
    )  # fmt: skip
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_C, BLOCK_G]
    p = tl.exp2((scores * scale - lse[None, :]) * LOG2E)
    mass = tl.sum(tl.where(inside[:, None] & mask_g[None, :], p, 0.0), 1)  # [BLOCK_C]
    offs_b = tl.arange(0, BLOCK_B)  # [BLOCK_B]
    cell = ((first + offs_b) * PER_SEL)[:, None]  # [BLOCK_B, 1]
    last = tl.minimum(block[None, :] + PER_CMP, cell + PER_SEL)
    shared = tl.maximum(last - tl.maximum(block[None, :], cell), 0)  # [BLOCK_B, BLOCK_C]
    found = tl.sum(shared.to(tl.float32) * mass[None, :], 1)  # [BLOCK_B]
    out = scores_ptr + (token * tl.num_programs(1) + kv_head) * pitch
    tl.store(out + first + offs_b, found, mask=(offs_b < BLOCKS) & (first + offs_b < end))

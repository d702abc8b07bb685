"""Launch of block selection."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.nsa.kernels_select import nsa_select_kernel
from sparsek_kernels.nsa.launch_common import launch_config, problem_shape, tile_grid
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from sparsek_kernels.nsa.spec import NSASpec


def select(
    block_indices: torch.Tensor,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
    scale: float,
) -> None:
    """Fill contiguous ``block_indices [B, N, Hkv, top_n]``."""
    if block_indices.numel() == 0:
        return
    shape = problem_shape(q, k_cmp.shape[2], seq_len)
    config = launch_config(q, shape, spec.top_n)
    block_g = shape.padded_group
    block_t = max(config.select.block_m // block_g, 1)
    if block_t * block_g < 16:
        block_t = 16 // block_g
    free = max(spec.top_n - spec.num_init_blocks - spec.num_local_blocks, 1)
    block_s = triton.next_power_of_2(free)
    block_c = triton.next_power_of_2(spec.cells_per_sel)
    block_b = max(config.select.block_n, block_s, 16 // block_c)
    cu = cu_cmp = q
    if cu_seqlens is not None:
        cu = cu_seqlens
        cu_cmp = compressed_cu_seqlens(cu_seqlens, spec.cmp_block_size, spec.cmp_stride)
    grid, tiles = tile_grid(cu_seqlens, shape.num_q, block_t, shape.num_kv_heads, shape.batch)
    nsa_select_kernel[grid](
        block_indices,
        q,
        k_cmp,
        lse.contiguous(),
        cu,
        cu_cmp,
        cu if tiles is None else tiles,
        scale,
        *q.stride(),
        *k_cmp.stride(),
        shape.num_q,
        seq_len - shape.num_q,
        shape.num_heads,
        k_cmp.shape[1],
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        CMP_BLOCK=spec.cmp_block_size,
        CMP_STRIDE=spec.cmp_stride,
        SEL_BLOCK=spec.sel_block_size,
        TOP_N=spec.top_n,
        NUM_INIT=spec.num_init_blocks,
        NUM_LOCAL=spec.num_local_blocks,
        VARLEN=cu_seqlens is not None,
        BLOCK_T=block_t,
        BLOCK_G=block_g,
        BLOCK_B=block_b,
        BLOCK_C=block_c,
        BLOCK_D=shape.padded_dim,
        BLOCK_S=block_s,
        BLOCK_O=triton.next_power_of_2(spec.top_n),
        PRECISION=config.precision,
        num_warps=config.select.num_warps,
        num_stages=config.select.num_stages,
    )

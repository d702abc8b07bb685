"""Launches of block selection: scores of some tokens at a time, then their best blocks."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.common.descriptors import describable, describe, tile_layout
from sparsek_kernels.nsa.config import LaunchConfig, ProblemShape
from sparsek_kernels.nsa.launching import launch_config, problem_shape, tile_grid
from sparsek_kernels.nsa.select.kernels.scores import nsa_block_scores_kernel, nsa_top_blocks_kernel
from sparsek_kernels.nsa.select.kernels.scores_sm90 import (
    WARPGROUPS,
    nsa_block_scores_hopper_kernel,
)
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window.launch_sm90 import copyable

_SCRATCH_SCORES = 1 << 25  # block scores held at once
_LEAST_ROWS = 2048  # tokens of a launch, however many blocks there are


def score_pitch(num_blocks: int) -> int:
    """Places in a row of the scratch: no tile of a kernel's blocks reaches beyond it."""
    return -(-num_blocks // 64) * 64


def select(
    block_indices: torch.Tensor,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
    scale: float,
    config: LaunchConfig | None = None,
) -> None:
    """Fill contiguous ``block_indices [B, N, Hkv, top_n]``."""
    if block_indices.numel() == 0:
        return
    shape = problem_shape(q, k_cmp.shape[2], seq_len)
    config = config or launch_config(q, shape, spec.top_n)
    pitch = score_pitch(spec.num_selectable(seq_len))
    free = spec.top_n - spec.num_init_blocks - spec.num_local_blocks
    scored = free > 0 and k_cmp.shape[1] > 0
    per_row = shape.batch * shape.num_kv_heads * pitch
    step = min(max(_SCRATCH_SCORES // per_row, _LEAST_ROWS), shape.num_q)
    scores = torch.empty((per_row * step if scored else 1,), dtype=torch.float32, device=q.device)
    cu_cmp, token_seq = packed_maps(cu_seqlens, shape.num_q, spec)
    lse = lse.contiguous()
    offset = seq_len - shape.num_q
    for first in range(0, shape.num_q, step):
        rows = min(step, shape.num_q - first)
        if scored:
            score(
                *(scores, q, k_cmp, lse, cu_seqlens, cu_cmp, first, rows, offset, pitch),
                *(shape, spec, scale, config),
            )
        choose(block_indices, scores, token_seq, cu_seqlens, first, rows, offset, spec, pitch)


def packed_maps(
    cu_seqlens: torch.Tensor | None, num_q: int, spec: NSASpec
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Offsets of packed sequences' compressed blocks, and the sequence of each token."""
    if cu_seqlens is None:
        return None, None
    row = torch.arange(num_q, dtype=torch.int32, device=cu_seqlens.device)
    token_seq = torch.searchsorted(cu_seqlens[1:], row, right=True, out_int32=True)
    return compressed_cu_seqlens(cu_seqlens, spec.cmp_block_size, spec.cmp_stride), token_seq


def score(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_cmp: torch.Tensor | None,
    first: int,
    rows: int,
    offset: int,
    pitch: int,
    shape: ProblemShape,
    spec: NSASpec,
    scale: float,
    config: LaunchConfig,
) -> None:
    """Scores of rows ``first .. first + rows - 1`` on all blocks that the kernels look at."""
    tile, cells = config.select, spec.cells_per_sel
    hopper = config.select_hopper
    if (
        hopper is not None
        and spec.num_local_blocks >= 2
        and cells & (cells - 1) == 0
        and cells <= hopper.block_n
        and copyable(q)
        and describable(k_cmp)
    ):
        tile = hopper
    else:
        hopper = None
    block_t = max(max(tile.block_m, 16) // shape.padded_group, 1)
    together = block_t if hopper is None else block_t * WARPGROUPS.value
    cu_rows = None if cu_seqlens is None else cu_seqlens.clamp(first, first + rows)
    grid, tiles = tile_grid(cu_rows, rows, together, shape.num_kv_heads, shape.batch)
    maps = tuple(q if x is None else x for x in (cu_rows, cu_seqlens, cu_cmp, tiles))
    sizes = (first, rows, shape.num_q, offset, shape.num_heads, k_cmp.shape[1], pitch)
    rules = {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "CMP_BLOCK": spec.cmp_block_size,
        "CMP_STRIDE": spec.cmp_stride,
        "SEL_BLOCK": spec.sel_block_size,
        "NUM_LOCAL": spec.num_local_blocks,
        "VARLEN": cu_seqlens is not None,
        "BLOCK_T": block_t,
        "BLOCK_G": shape.padded_group,
    }
    if hopper is not None:
        k_desc, k_rows, k_cols = describe(k_cmp, tile.block_n)
        nsa_block_scores_hopper_kernel[grid](
            scores,
            q,
            k_desc,
            lse,
            *maps,
            scale,
            *(x // 8 for x in q.stride()[:3]),
            k_rows,
            k_cols,
            *sizes,
            Q_LAYOUT=tile_layout(block_t * shape.padded_group, shape.head_dim, q.dtype),
            **rules,
            BLOCK_K=tile.block_n,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            maxnreg=96,  # of 65536, for one program of twenty warps
        )
        return
    block_c = triton.next_power_of_2(cells)
    nsa_block_scores_kernel[grid](
        scores,
        q,
        k_cmp,
        lse,
        *maps,
        scale,
        *q.stride(),
        *k_cmp.stride(),
        *sizes,
        **rules,
        BLOCK_B=max(tile.block_n, 16 // block_c),
        BLOCK_C=block_c,
        BLOCK_D=shape.padded_dim,
        PRECISION=config.precision,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def blocks_reached(pitch: int, cu_seqlens: torch.Tensor | None, end: int, spec: NSASpec) -> int:
    """Blocks that a kernel looks at; causality bounds those that tokens before ``end`` reach."""
    reach = pitch
    if cu_seqlens is None:
        reach = min(pitch, (end - 1) // spec.sel_block_size + 1)
    return max(int(triton.next_power_of_2(reach)), 256)


def choose(
    block_indices: torch.Tensor,
    scores: torch.Tensor,
    token_seq: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    first: int,
    rows: int,
    offset: int,
    spec: NSASpec,
    pitch: int,
) -> None:
    """The best blocks of rows ``first .. first + rows - 1``; ``scores [B, rows, Hkv, pitch]``."""
    batch, num_q, num_kv_heads, _ = block_indices.shape
    width = blocks_reached(pitch, cu_seqlens, first + rows + offset, spec)
    nsa_top_blocks_kernel[(rows, num_kv_heads, batch)](
        block_indices,
        scores,
        block_indices if token_seq is None else token_seq,
        block_indices if cu_seqlens is None else cu_seqlens,
        first,
        rows,
        num_q,
        offset,
        pitch,
        SEL_BLOCK=spec.sel_block_size,
        TOP_N=spec.top_n,
        NUM_INIT=spec.num_init_blocks,
        NUM_LOCAL=spec.num_local_blocks,
        VARLEN=cu_seqlens is not None,
        BLOCK_B=width,
        BLOCK_O=triton.next_power_of_2(spec.top_n),
        num_warps=max(min(width // 1024, 16), 1),
    )

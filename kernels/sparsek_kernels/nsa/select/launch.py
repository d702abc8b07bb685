"""Launches of block selection: block scores of some tokens at a time, then the best blocks."""

from __future__ import annotations

import torch

from sparsek_kernels.common.alignment import copyable, describable
from sparsek_kernels.common.descriptors import describe, tile_layout
from sparsek_kernels.common.grids import tile_grid
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import next_power_of_2, octet_strides
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import TileConfig
from sparsek_kernels.nsa.select.kernels.scores import nsa_block_scores_kernel
from sparsek_kernels.nsa.select.kernels.scores_sm90 import (
    WARPGROUPS,
    nsa_block_scores_hopper_kernel,
)
from sparsek_kernels.nsa.select.kernels.topk import nsa_top_blocks_kernel
from sparsek_kernels.nsa.spec import NSASpec

_SCRATCH_SCORES = 1 << 25  # block scores held at once
_LEAST_ROWS = 2048  # tokens of a launch, however many blocks there are


def score_pitch(num_blocks: int) -> int:
    """Scores in a row of the scratch: ``num_blocks`` rounded up to whole tiles of the kernels."""
    return -(-num_blocks // 64) * 64


def select(problem: CompressedProblem, lse: torch.Tensor, block_indices: torch.Tensor) -> None:
    """Fill contiguous ``block_indices [B, N, Hkv, top_n]``.

    ``lse [B, Hq, N]`` holds the log-sum-exps of compressed attention.
    """
    if block_indices.numel() == 0:
        return
    shape, spec = problem.shape, problem.spec
    heads, pitch = shape.num_kv_heads, score_pitch(spec.num_selectable(problem.seq_len))
    free = spec.top_n - spec.num_init_blocks - spec.num_local_blocks
    scored = free > 0 and problem.k_cmp.shape[1] > 0
    per_row = shape.batch * heads * pitch
    step = min(max(_SCRATCH_SCORES // per_row, _LEAST_ROWS), shape.num_q)
    lse = lse.contiguous()
    token_seq, cu_seqlens = problem.token_seq, problem.cu_seqlens
    scratch = torch.empty(step * per_row if scored else 1, dtype=torch.float32, device=lse.device)
    for first in range(0, shape.num_q, step):
        rows = min(step, shape.num_q - first)
        size = (shape.batch, rows, heads, pitch)
        if scored:
            scores = scratch[: rows * per_row].view(size)
            score(problem, lse, scores, first)
        else:  # every block is forced
            scores = scratch.expand(size)
        choose(block_indices, scores, token_seq, cu_seqlens, spec, first, problem.offset)


def _hopper_tile(problem: CompressedProblem) -> TileConfig | None:
    """Tile of the warp-specialised kernel where it can run."""
    tile, strides = problem.config.select_hopper, problem.spec.strides_per_sel
    fits = (
        tile is not None
        and problem.spec.num_local_blocks >= 2
        and strides & (strides - 1) == 0
        and strides <= tile.block_n
        and copyable(problem.q)
        and describable(problem.k_cmp)
    )
    return tile if fits else None


def score(problem: CompressedProblem, lse: torch.Tensor, scores: torch.Tensor, first: int) -> None:
    """Fill ``scores [B, rows, Hkv, pitch]`` of the rows from ``first`` on."""
    shape, spec, q, k_cmp = problem.shape, problem.spec, problem.q, problem.k_cmp
    cu_seqlens = problem.cu_seqlens
    _, rows, heads, pitch = scores.shape
    hopper = _hopper_tile(problem)
    tile = hopper or problem.config.select
    block_t = max(max(tile.block_m, 16) // shape.padded_group, 1)
    together = block_t if hopper is None else block_t * WARPGROUPS.value
    cu_rows = None if cu_seqlens is None else cu_seqlens.clamp(first, first + rows)
    grid, tiles = tile_grid(cu_rows, rows, together, heads, shape.batch)
    maps = pointers(problem.q, cu_rows, cu_seqlens, problem.cu_cmp, tiles)
    sizes = (first, rows, shape.num_q, problem.offset, shape.num_heads, k_cmp.shape[1], pitch)
    rules = {
        **problem.rules,
        "SEL_BLOCK": spec.sel_block_size,
        "NUM_LOCAL": spec.num_local_blocks,
        "BLOCK_T": block_t,
        "BLOCK_G": shape.padded_group,
    }
    if hopper is not None:
        k_desc, k_rows, k_cols = describe(k_cmp, tile.block_n)
        run(
            nsa_block_scores_hopper_kernel, grid,
            scores, q, k_desc, lse, *maps, problem.softmax_scale,
            *octet_strides(q), k_rows, k_cols, *sizes,
            Q_LAYOUT=tile_layout(block_t * shape.padded_group, shape.head_dim, q.dtype),
            **rules, BLOCK_K=tile.block_n, STAGES=tile.num_stages, num_warps=tile.num_warps,
            maxnreg=96,  # twenty warps share 65536 registers
        )  # fmt: skip
        return
    block_c = next_power_of_2(spec.strides_per_sel)
    run(
        nsa_block_scores_kernel, grid,
        scores, q, k_cmp, lse, *maps, problem.softmax_scale,
        *q.stride(), *k_cmp.stride(), *sizes,
        **rules, BLOCK_B=max(tile.block_n, 16 // block_c), BLOCK_C=block_c,
        BLOCK_D=shape.padded_dim, PRECISION=problem.config.precision, **tile.pipeline,
    )  # fmt: skip


def blocks_reached(pitch: int, cu_seqlens: torch.Tensor | None, end: int, spec: NSASpec) -> int:
    """Blocks that a program looks at: a bound on those that tokens before ``end`` see."""
    seen = pitch
    if cu_seqlens is None:
        seen = min(pitch, (end - 1) // spec.sel_block_size + 1)
    return max(next_power_of_2(seen), 256)


def choose(
    block_indices: torch.Tensor,
    scores: torch.Tensor,
    token_seq: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
    first: int = 0,
    offset: int = 0,
) -> None:
    """The best blocks of the rows from ``first`` on of ``scores [B, rows, Hkv, pitch]``.

    Packed: ``token_seq`` is the sequence of each row.  Else row ``i`` has position ``i + offset``.
    """
    batch, num_q, num_kv_heads, _ = block_indices.shape
    rows, pitch = scores.shape[1], scores.shape[3]
    width = blocks_reached(pitch, cu_seqlens, first + rows + offset, spec)
    run(
        nsa_top_blocks_kernel, (rows, num_kv_heads, batch),
        block_indices, scores, block_indices if token_seq is None else token_seq,
        block_indices if cu_seqlens is None else cu_seqlens, first, rows, num_q, offset, pitch,
        SEL_BLOCK=spec.sel_block_size, TOP_N=spec.top_n, NUM_INIT=spec.num_init_blocks,
        NUM_LOCAL=spec.num_local_blocks, VARLEN=cu_seqlens is not None, BLOCK_B=width,
        BLOCK_O=next_power_of_2(spec.top_n), num_warps=max(min(width // 1024, 16), 1),
    )  # fmt: skip

"""Launches of attention over compressed blocks."""

from __future__ import annotations

import torch

from sparsek_kernels.common.alignment import describable
from sparsek_kernels.common.grids import query_grid, tile_grid
from sparsek_kernels.common.operators import new_like, pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.row_dots import row_dots
from sparsek_kernels.nsa.compressed import launch_sm90
from sparsek_kernels.nsa.compressed.kernels.bwd import (
    nsa_compressed_bwd_dkdv_kernel,
    nsa_compressed_bwd_dq_kernel,
)
from sparsek_kernels.nsa.compressed.kernels.fwd import nsa_compressed_fwd_kernel
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import TileConfig


def _sizes(problem: CompressedProblem) -> tuple[int, int, int]:
    """Runtime sizes in the order in which the kernels take them."""
    return problem.shape.num_q, problem.offset, problem.shape.num_heads


def _options(problem: CompressedProblem, tile: TileConfig) -> dict[str, int | bool | str]:
    """Compile-time arguments of the kernels."""
    return {
        **problem.rules,
        "BLOCK_D": problem.shape.padded_dim,
        "PRECISION": problem.config.precision,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        **tile.pipeline,
    }


def forward(problem: CompressedProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``."""
    if out.numel() == 0:
        return
    q, k_cmp, v_cmp = problem.q, problem.k_cmp, problem.v_cmp
    hopper = problem.config.compressed_hopper
    if hopper is not None and k_cmp.numel() and describable(q):
        launch_sm90.forward(problem, hopper, launch_sm90.arrange(problem), out, lse)
        return
    tile = problem.config.compressed
    grid, tiles = query_grid(problem.shape, problem.cu_seqlens, tile.block_m)
    run(
        nsa_compressed_fwd_kernel, grid,
        out, lse, q, k_cmp, v_cmp, *pointers(problem.q, problem.cu_seqlens, problem.cu_cmp, tiles),
        problem.softmax_scale,
        *q.stride(), *k_cmp.stride(), *v_cmp.stride(), *_sizes(problem),
        **_options(problem, tile),
    )  # fmt: skip


def backward(
    problem: CompressedProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp; bitwise reproducible."""
    q, k_cmp, v_cmp = problem.q, problem.k_cmp, problem.v_cmp
    if q.numel() == 0 or k_cmp.numel() == 0:
        return new_like(q).zero_(), new_like(k_cmp).zero_(), new_like(v_cmp).zero_()
    delta = row_dots(dout, dlse, out)
    hopper = problem.config.compressed_bwd_hopper
    if hopper is not None and describable(q, k_cmp, v_cmp):
        return launch_sm90.backward(problem, hopper, dout, lse, delta)
    shape, cu_seqlens, cu_cmp = problem.shape, problem.cu_seqlens, problem.cu_cmp
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cmp, v_cmp))
    inputs = (dout, q, k_cmp, v_cmp, lse, delta)
    strides = (*dout.stride(), *q.stride(), *k_cmp.stride(), *v_cmp.stride())
    tile = problem.config.compressed_dq
    grid, tiles = query_grid(problem.shape, problem.cu_seqlens, tile.block_m)
    run(
        nsa_compressed_bwd_dq_kernel, grid,
        dq, *inputs, *pointers(problem.q, cu_seqlens, cu_cmp, tiles), problem.softmax_scale,
        *strides, *_sizes(problem),
        **_options(problem, tile),
    )  # fmt: skip
    tile = problem.config.compressed_dkdv
    batch, rows, num_kv_heads, head_dim = k_cmp.shape
    # Packed: rows past the last sequence's blocks belong to no tile.
    new = torch.empty if cu_cmp is None else torch.zeros
    part_shape = (2, num_kv_heads, shape.group, batch, rows, head_dim)
    parts = new(part_shape, dtype=torch.float32, device=q.device)
    grid, tiles = tile_grid(cu_cmp, rows, tile.block_n, shape.num_heads, batch)
    run(
        nsa_compressed_bwd_dkdv_kernel, grid,
        parts[0], parts[1], *inputs, *pointers(problem.q, cu_seqlens, cu_cmp, tiles),
        problem.softmax_scale,
        *strides, *_sizes(problem), rows,
        **_options(problem, tile),
    )  # fmt: skip
    for total, part in ((dk, parts[0]), (dv, parts[1])):
        total.copy_(part.sum(dim=1).permute(1, 2, 0, 3))
    return dq, dk, dv

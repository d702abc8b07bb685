"""Launches of the block-sparse kernels: configuration, grids and strides."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.block_sparse import launch_bwd_sm90, launch_sm90
from sparsek_kernels.block_sparse.config import LaunchConfig, TileConfig
from sparsek_kernels.block_sparse.kernels.bwd import (
    block_sparse_bwd_dkdv_kernel,
    block_sparse_bwd_dq_kernel,
)
from sparsek_kernels.block_sparse.kernels.fwd import block_sparse_fwd_kernel
from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common.alignment import boxable, describable
from sparsek_kernels.common.grids import Grid
from sparsek_kernels.common.operators import new_like, pointers
from sparsek_kernels.common.row_dots import row_dots
from sparsek_kernels.common.shapes import strides


def _query_grid(problem: BlockSparseProblem, tile: TileConfig) -> Grid:
    """Programs of a kernel that owns tiles of queries."""
    batch, num_q, _, _ = problem.q.shape
    packs = triton.cdiv(problem.shape.group, tile.pack)
    return triton.cdiv(num_q, tile.rows), problem.shape.num_kv_heads * packs, batch


def _sizes(problem: BlockSparseProblem, offsets: torch.Tensor) -> tuple[int, ...]:
    """The sizes that end each kernel's scalars; ``offsets`` are of its rows or columns."""
    _, num_q, num_heads, _ = problem.q.shape
    return num_q, problem.k.shape[1], num_heads, offsets.shape[1] - 1, problem.shape.pattern_heads


def _rules(
    problem: BlockSparseProblem, config: LaunchConfig, tile: TileConfig
) -> dict[str, int | bool | str]:
    """Constexprs and options that the portable kernels share."""
    shape = problem.shape
    return {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "CAUSAL": problem.causal,
        "BLOCK": shape.block_size,
        "BLOCK_D": shape.padded_dim,
        "PRECISION": config.precision,
        "ROWS": tile.rows,
        "NUM_STAGES": tile.num_stages,
        "HAS_QUERY_MASK": problem.query_mask is not None,
        "HAS_KEY_MASK": problem.key_mask is not None,
        "DROPOUT": problem.drop_below > 0,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _options(problem: BlockSparseProblem) -> tuple[torch.Tensor | float, ...]:
    """Masks, state of dropout and scalars, which each kernel takes before its strides."""
    masks = (None if x is None else x.contiguous().view(torch.uint8)
             for x in (problem.key_mask, problem.query_mask))  # fmt: skip
    tensors = pointers(problem.q, *masks, problem.rng_state)
    return *tensors, problem.softmax_scale, problem.keep_scale, problem.drop_below


def forward(
    problem: BlockSparseProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Write ``out`` and ``lse``; ``config`` is the table's unless given."""
    if out.numel() == 0:
        return
    q, k, v = problem.q, problem.k, problem.v
    config = config or problem.launch_config()
    if config.hopper_stages is not None and k.numel() and describable(q, k, v):
        launch_sm90.forward(problem, config.hopper_stages, out, lse)
        return
    tile = config.forward
    block_sparse_fwd_kernel[_query_grid(problem, tile)](
        out, lse, q, k, v, problem.crow_indices, problem.col_indices, *_options(problem),
        *strides(out, q, k, v), *_sizes(problem, problem.crow_indices),
        **_rules(problem, config, tile), PACK=tile.pack, BLOCK_M=tile.own, BLOCK_N=tile.step,
    )  # fmt: skip


def backward(
    problem: BlockSparseProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; bitwise reproducible."""
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = new_like(q), new_like(k), new_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    config = config or problem.launch_config()
    delta = row_dots(dout, dlse, out)
    hopper = config.hopper_backward
    if hopper is not None and boxable(q, k, v) and launch_bwd_sm90.fits(problem, hopper):
        if not boxable(dout):
            dout = dout.contiguous()  # such as the expanded gradient of a sum
        launch_bwd_sm90.backward(problem, hopper, (dq, dk, dv), dout, lse, delta)
        return dq, dk, dv
    inputs = (dout, q, k, v, lse, delta)
    tail = strides(dout, q, k, v)
    tile = config.dkdv
    block_sparse_bwd_dkdv_kernel[(k.shape[2] * triton.cdiv(k.shape[1], tile.rows), k.shape[0])](
        dk, dv, *inputs, problem.ccol_indices, problem.row_indices, *_options(problem),
        *strides(dk, dv, dims=3), *tail, *_sizes(problem, problem.ccol_indices),
        **_rules(problem, config, tile), BLOCK_M=tile.step, BLOCK_N=tile.own,
    )  # fmt: skip
    tile = config.dq
    block_sparse_bwd_dq_kernel[_query_grid(problem, tile)](
        dq, *inputs, problem.crow_indices, problem.col_indices, *_options(problem),
        *strides(dq, dims=3), *tail, *_sizes(problem, problem.crow_indices),
        **_rules(problem, config, tile), PACK=tile.pack, BLOCK_M=tile.own, BLOCK_N=tile.step,
    )  # fmt: skip
    return dq, dk, dv

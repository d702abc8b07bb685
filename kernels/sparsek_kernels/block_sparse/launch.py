"""Launches of the block-sparse kernels: configuration, grids and strides."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.block_sparse.config import LaunchConfig, ProblemShape, select_config
from sparsek_kernels.block_sparse.kernels.bwd import (
    block_sparse_bwd_dkdv_kernel,
    block_sparse_bwd_dq_kernel,
)
from sparsek_kernels.block_sparse.kernels.fwd import block_sparse_fwd_kernel
from sparsek_kernels.block_sparse.kernels.fwd_sm90 import block_sparse_hopper_fwd_kernel
from sparsek_kernels.common.alignment import describable
from sparsek_kernels.common.descriptors import describe
from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.row_dots import row_dots


class _Call:
    """Sizes and configuration that the kernels of one call share."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        num_patterns: int,
        block_size: int,
        causal: bool,
        config: LaunchConfig | None,
    ) -> None:
        self.batch, self.num_q, num_heads, dim = q.shape
        self.num_k, self.num_kv_heads = k.shape[1:3]
        shape = ProblemShape(
            num_heads, self.num_kv_heads, dim, block_size, num_patterns, self.num_k
        )
        self.shape = shape
        self.config = config or select_config(shape, q.dtype, device_arch(q.device))
        self.sizes = (self.num_q, self.num_k, num_heads)
        self.options = {
            "GROUP": shape.group,
            "HEAD_DIM": dim,
            "CAUSAL": causal,
            "BLOCK": block_size,
            "BLOCK_D": shape.padded_dim,
            "PRECISION": self.config.precision,
        }

    def query_grid(self, rows: int, pack: int) -> tuple[int, int, int]:
        """Programs of a kernel that owns query tiles."""
        packs = triton.cdiv(self.shape.group, pack)
        return triton.cdiv(self.num_q, rows), self.num_kv_heads * packs, self.batch


def launch_forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    block_size: int,
    causal: bool,
    softmax_scale: float,
    config: LaunchConfig | None = None,
) -> None:
    """Write ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]`` for checked arguments."""
    if out.numel() == 0:
        return
    call = _Call(q, k, crow_indices.shape[0], block_size, causal, config)
    stages = call.config.hopper_stages
    if stages is not None and k.numel() and describable(q, k, v):
        _forward_hopper(
            call, stages, out, lse, q, k, v, crow_indices, col_indices, causal, softmax_scale
        )
        return
    tile = call.config.forward
    block_sparse_fwd_kernel[call.query_grid(tile.rows, tile.pack)](
        out,
        lse,
        q,
        k,
        v,
        crow_indices,
        col_indices,
        softmax_scale,
        *out.stride(),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *call.sizes,
        crow_indices.shape[1] - 1,
        call.shape.pattern_heads,
        **call.options,
        PACK=tile.pack,
        ROWS=tile.rows,
        BLOCK_M=tile.own,
        BLOCK_N=tile.step,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _forward_hopper(
    call: _Call,
    stages: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    causal: bool,
    softmax_scale: float,
) -> None:
    """Run the warp-specialised forward kernel."""
    shape = call.shape
    num_rows = crow_indices.shape[1] - 1
    heads = 128 // shape.block_size
    num_items = call.batch * num_rows * call.num_kv_heads * triton.cdiv(shape.group, heads)
    q_desc, q_rows, q_cols = describe(q, 64, 64)
    k_desc, k_rows, k_cols = describe(k, shape.block_size, 64)
    v_desc, v_rows, v_cols = describe(v, shape.block_size, 64)
    block_sparse_hopper_fwd_kernel[(min(num_items, multiprocessors(q.device)),)](
        out,
        lse,
        q_desc,
        k_desc,
        v_desc,
        crow_indices,
        col_indices,
        softmax_scale * LOG2E.value,
        *out.stride()[:3],
        q_rows,
        k_rows,
        v_rows,
        q_cols,
        k_cols,
        v_cols,
        call.num_q,
        call.num_k,
        num_rows,
        call.num_kv_heads,
        num_items,
        shape.pattern_heads,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        CAUSAL=causal,
        BLOCK=shape.block_size,
        STAGES=stages,
        num_warps=4,
    )


def launch_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    ccol_indices: torch.Tensor,
    row_indices: torch.Tensor,
    block_size: int,
    causal: bool,
    softmax_scale: float,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for checked arguments; bitwise reproducible."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = row_dots(dout, dlse, out)
    call = _Call(q, k, crow_indices.shape[0], block_size, causal, config)
    inputs = (dout, q, k, v, lse, delta)
    strides = (*dout.stride(), *q.stride(), *k.stride(), *v.stride())
    tile = call.config.dkdv
    block_sparse_bwd_dkdv_kernel[(triton.cdiv(call.num_k, tile.rows), k.shape[2], call.batch)](
        dk,
        dv,
        *inputs,
        ccol_indices,
        row_indices,
        softmax_scale,
        *dk.stride()[:3],
        *dv.stride()[:3],
        *strides,
        *call.sizes,
        ccol_indices.shape[1] - 1,
        call.shape.pattern_heads,
        **call.options,
        ROWS=tile.rows,
        BLOCK_M=tile.step,
        BLOCK_N=tile.own,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    tile = call.config.dq
    block_sparse_bwd_dq_kernel[call.query_grid(tile.rows, tile.pack)](
        dq,
        *inputs,
        crow_indices,
        col_indices,
        softmax_scale,
        *dq.stride()[:3],
        *strides,
        *call.sizes,
        crow_indices.shape[1] - 1,
        call.shape.pattern_heads,
        **call.options,
        PACK=tile.pack,
        ROWS=tile.rows,
        BLOCK_M=tile.own,
        BLOCK_N=tile.step,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return dq, dk, dv

"""Launches of attention over compressed blocks."""

from __future__ import annotations

import torch
import triton

from sparsek_kernels.common.descriptors import describable
from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed_hopper
from sparsek_kernels.nsa.compressed.kernels.bwd import (
    nsa_compressed_bwd_dkdv_kernel,
    nsa_compressed_bwd_dq_kernel,
)
from sparsek_kernels.nsa.compressed.kernels.fwd import nsa_compressed_fwd_kernel
from sparsek_kernels.nsa.config import LaunchConfig, TileConfig
from sparsek_kernels.nsa.launching import launch_config, problem_shape, tile_grid
from sparsek_kernels.nsa.sequences import compressed_cu_seqlens
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window.launch import row_dots


class _Call:
    """What the launches of one call share."""

    def __init__(
        self,
        q: torch.Tensor,
        k_cmp: torch.Tensor,
        seq_len: int,
        cu_seqlens: torch.Tensor | None,
        spec: NSASpec,
        config: LaunchConfig | None,
    ) -> None:
        self.shape = problem_shape(q, k_cmp.shape[2], seq_len)
        self.config = config or launch_config(q, self.shape, spec.top_n)
        self.cu_seqlens = cu_seqlens
        self.cu_cmp: torch.Tensor | None = None
        if cu_seqlens is not None:
            self.cu_cmp = compressed_cu_seqlens(cu_seqlens, spec.cmp_block_size, spec.cmp_stride)
        self.cu = q if cu_seqlens is None else cu_seqlens
        self.cmp = q if self.cu_cmp is None else self.cu_cmp
        self.sizes = (self.shape.num_q, seq_len - self.shape.num_q, self.shape.num_heads)
        self.rules = {
            "GROUP": self.shape.group,
            "HEAD_DIM": self.shape.head_dim,
            "CMP_BLOCK": spec.cmp_block_size,
            "CMP_STRIDE": spec.cmp_stride,
            "VARLEN": cu_seqlens is not None,
            "BLOCK_D": self.shape.padded_dim,
            "PRECISION": self.config.precision,
        }

    def tile(self, tile: TileConfig) -> dict[str, int]:
        return {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def query_grid(self, block: int) -> tuple[tuple[int, int, int], torch.Tensor]:
        shape = self.shape
        grid, tiles = tile_grid(self.cu_seqlens, shape.num_q, block, shape.num_heads, shape.batch)
        return grid, self.cu if tiles is None else tiles


def forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
    scale: float,
    config: LaunchConfig | None = None,
) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``."""
    if out.numel() == 0:
        return
    call = _Call(q, k_cmp, seq_len, cu_seqlens, spec, config)
    hopper = call.config.hopper
    if hopper is not None and k_cmp.numel() and describable(q):
        keys = launch_compressed_hopper.arrange(q, k_cmp, v_cmp, cu_seqlens, call.cu_cmp)
        launch_compressed_hopper.forward(
            out, lse, q, keys, cu_seqlens, call.cu_cmp, call.shape, hopper, spec, scale
        )
        return
    tile = call.config.compressed
    grid, tiles = call.query_grid(tile.block_m)
    nsa_compressed_fwd_kernel[grid](
        out,
        lse,
        q,
        k_cmp,
        v_cmp,
        call.cu,
        call.cmp,
        tiles,
        scale,
        *q.stride(),
        *k_cmp.stride(),
        *v_cmp.stride(),
        *call.sizes,
        **call.rules,
        **call.tile(tile),
    )


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seq_len: int,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
    scale: float,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp; bitwise reproducible."""
    if q.numel() == 0 or k_cmp.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    call = _Call(q, k_cmp, seq_len, cu_seqlens, spec, config)
    shape = call.shape
    delta = row_dots(dout, dlse, out)
    hopper = call.config.hopper_bwd
    if hopper is not None and describable(q, k_cmp, v_cmp):
        return launch_compressed_hopper.backward(
            *(dout, q, k_cmp, v_cmp, lse, delta, cu_seqlens, call.cu_cmp, shape, hopper),
            *(spec, scale),
        )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cmp, v_cmp))
    inputs = (dout, q, k_cmp, v_cmp, lse, delta, call.cu, call.cmp)
    strides = (*dout.stride(), *q.stride(), *k_cmp.stride(), *v_cmp.stride())
    tile = call.config.compressed_dq
    grid, tiles = call.query_grid(tile.block_m)
    nsa_compressed_bwd_dq_kernel[grid](
        dq, *inputs, tiles, scale, *strides, *call.sizes, **call.rules, **call.tile(tile)
    )
    tile = call.config.compressed_dkdv
    batch, rows, num_kv_heads, head_dim = k_cmp.shape
    key_tiles = call.cu
    key_grid = (triton.cdiv(rows, tile.block_n), shape.num_heads, batch)
    part_shape = (2, num_kv_heads, shape.group, batch, rows, head_dim)
    parts = torch.empty(part_shape, dtype=torch.float32, device=q.device)
    if call.cu_cmp is not None:
        parts.zero_()  # rows past the last sequence's blocks belong to no tile
        key_grid, found = tile_grid(call.cu_cmp, rows, tile.block_n, shape.num_heads, 1)
        key_tiles = key_tiles if found is None else found
    nsa_compressed_bwd_dkdv_kernel[key_grid](
        parts[0],
        parts[1],
        *inputs,
        key_tiles,
        scale,
        *strides,
        *call.sizes,
        rows,
        **call.rules,
        **call.tile(tile),
    )
    for total, part in ((dk, parts[0]), (dv, parts[1])):
        total.copy_(part.sum(dim=1).permute(1, 2, 0, 3))
    return dq, dk, dv

"""Launches of the Hopper kernels: tensor descriptors, persistent grid, scratch tensors."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.common.descriptors import describe, multiprocessors
from sparsek_kernels.common.launching import CompiledLaunch, launch
from sparsek_kernels.sink_window.calls import Call
from sparsek_kernels.sink_window.config import TileConfig
from sparsek_kernels.sink_window.kernels.bwd_sm90 import sink_window_hopper_bwd_kernel
from sparsek_kernels.sink_window.kernels.fwd_sm90 import sink_window_hopper_fwd_kernel
from sparsek_kernels.sink_window.kernels.fwd_small_sm90 import sink_window_hopper_small_kernel
from sparsek_kernels.sink_window.spec import AttentionSpec

_LOG2_E = 1.4426950408889634
_WARPGROUP_ROWS = 64


def forward_rules(tile: TileConfig) -> dict[str, int | bool]:
    """How the warp-specialised forward kernel lays out its tiles and their buffers."""
    return {
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "PAIRED": tile.block_m == _WARPGROUP_ROWS,
        "HOLD_Q": tile.hold_q,
    }


def forward_hopper(
    call: Call,
    tile: TileConfig,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    spec: AttentionSpec,
) -> None:
    """Run the warp-specialised forward kernel."""
    shape = call.shape
    rules = forward_rules(tile)
    (blocks, heads, batch), tiles = call.query_grid(tile.block_m)
    num_tiles = blocks * (heads // 2 if rules["PAIRED"] else heads) * batch
    sink_block = call.config.sink_block
    q_desc, q_rows, q_cols = describe(q, _WARPGROUP_ROWS)
    k_desc, k_rows, k_cols = describe(k, tile.block_n)
    v_desc, v_rows, v_cols = describe(v, tile.block_n)
    sink_k_desc, sink_v_desc = k_desc, v_desc
    if shape.num_sink:
        sink_k_desc, sink_v_desc = describe(k, sink_block)[0], describe(v, sink_block)[0]
    sink_window_hopper_fwd_kernel[(min(num_tiles, multiprocessors(q.device)),)](
        out,
        lse if lse is not None else out,
        q_desc,
        k_desc,
        v_desc,
        sink_k_desc,
        sink_v_desc,
        sinks if sinks is not None else q,
        call.cu_q,
        call.cu_k,
        tiles,
        spec.softmax_scale * _LOG2_E,
        shape.num_sink,
        call.window,
        *out.stride()[:3],
        q_rows,
        k_rows,
        v_rows,
        q_cols,
        k_cols,
        v_cols,
        *call.sizes,
        blocks,
        num_tiles,
        **call.mask,
        HAS_SINK_KEYS=shape.num_sink > 0,
        HAS_SINKS=sinks is not None,
        STORE_LSE=lse is not None,
        VARLEN=call.varlen,
        **rules,
        BLOCK_S=sink_block,
        heads_together=math.gcd(shape.num_kv_heads * batch, call.config.forward_together),
        num_warps=tile.num_warps,
    )


def copyable(*tensors: torch.Tensor) -> bool:
    """Whether copies of 16 bytes fit the heads of ``[B, N, H, D]`` tensors of 16-bit elements."""
    return all(
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(s % 8 for s in x.stride()[:3])
        for x in tensors
    )


def forward_small(
    call: Call,
    tile: TileConfig,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    spec: AttentionSpec,
) -> CompiledLaunch | None:
    """Run the kernel for few rows, without waiting for the kernel ahead of it to end."""
    grid, _ = call.query_grid(tile.block_m)
    return launch(
        sink_window_hopper_small_kernel,
        grid,
        (
            out,
            lse if lse is not None else out,
            q,
            k,
            v,
            sinks if sinks is not None else q,
        ),
        (
            spec.softmax_scale * _LOG2_E,
            *(stride // 8 for x in (out, q, k, v) for stride in x.stride()[:3]),
            *call.sizes,
        ),
        {
            "GROUP": call.mask["GROUP"],
            "HEAD_DIM": call.shape.head_dim,
            "CAUSAL": spec.causal,
            "HAS_SINKS": sinks is not None,
            "STORE_LSE": lse is not None,
            "BLOCK_N": tile.block_n,
            "CHUNKS": tile.num_stages,
        },
        num_warps=tile.num_warps,
        launch_pdl=True,
    )


def _overwrites(call: Call, tile: TileConfig) -> bool:
    """Whether every query block gets a tile of the fused backward kernel that no other overlaps."""
    shape = call.shape
    whole = shape.num_q % tile.block_m == 0 and shape.num_k >= shape.num_q
    return whole and not call.varlen and shape.num_sink == 0


def new_accumulator(call: Call, tile: TileConfig, device: torch.device) -> torch.Tensor:
    """fp32 ``dq_acc [B, Hq, N, D]`` for :func:`backward_hopper`: zeros where that one only adds."""
    shape = call.shape
    new = torch.empty if _overwrites(call, tile) else torch.zeros
    dims = (shape.batch, shape.num_heads, shape.num_q, shape.head_dim)
    return new(dims, dtype=torch.float32, device=device)


def backward_hopper(
    call: Call,
    tile: TileConfig,
    dq_acc: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    sink_grads: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Run the fused backward kernel: fill ``dk``, ``dv`` and a :func:`new_accumulator`."""
    shape = call.shape
    (blocks, heads, batch), tiles = call.key_grid(tile.block_n)
    order_blocks = shape.num_q // tile.block_m + (shape.num_seqs or 0) + 1
    # Key blocks announced per query block, and the ticket counter behind them.
    order = torch.zeros(
        shape.batch * shape.num_heads * order_blocks + 4, dtype=torch.int32, device=q.device
    )
    ticket = order[-4:]
    q_desc, q_rows, q_cols = describe(q, tile.block_m)
    g_desc, g_rows, g_cols = describe(dout, tile.block_m)
    k_desc, k_rows, k_cols = describe(k, tile.block_n)
    v_desc, v_rows, v_cols = describe(v, tile.block_n)
    dq_desc, _, _ = describe(dq_acc.view(1, -1, 1, shape.head_dim), tile.block_m)
    sink_dk, sink_dv = sink_grads if sink_grads is not None else (delta, delta)
    sink_window_hopper_bwd_kernel[(blocks * heads * batch,)](
        dk,
        dv,
        order,
        ticket,
        dq_desc,
        q_desc,
        g_desc,
        k_desc,
        v_desc,
        lse,
        delta,
        sink_dk,
        sink_dv,
        call.cu_q,
        call.cu_k,
        tiles,
        *call.scalars,
        *dk.stride()[:3],
        q_rows,
        g_rows,
        k_rows,
        v_rows,
        q_cols,
        g_cols,
        k_cols,
        v_cols,
        *call.sizes,
        blocks,
        order_blocks,
        math.gcd(heads * batch, call.config.backward_together),
        1,
        shape.num_q + tile.block_m,
        0,
        **call.mask,
        HAS_SINK_KEYS=sink_grads is not None,
        VARLEN=call.varlen,
        OVERWRITES=_overwrites(call, tile),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        Q_STAGES=tile.num_stages,
        G_STAGES=2,
        num_warps=tile.num_warps,
    )

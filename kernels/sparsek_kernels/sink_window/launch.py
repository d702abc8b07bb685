"""Launches of the sink-window kernels: configuration, grids, strides and scratch tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton

from sparsek_kernels.common.descriptors import describable
from sparsek_kernels.common.launching import CompiledLaunch, launch
from sparsek_kernels.sink_window.calls import Call
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig, accumulator_parts
from sparsek_kernels.sink_window.kernels.bwd import (
    sink_window_bwd_dkdv_kernel,
    sink_window_bwd_dq_kernel,
)
from sparsek_kernels.sink_window.kernels.bwd_rows import (
    sink_window_bwd_delta_kernel,
    sink_window_bwd_finish_kernel,
)
from sparsek_kernels.sink_window.kernels.bwd_sink import sink_window_bwd_sink_kernel
from sparsek_kernels.sink_window.kernels.fwd import sink_window_fwd_kernel
from sparsek_kernels.sink_window.launch_sm90 import (
    backward_hopper,
    copyable,
    forward_hopper,
    forward_small,
    new_accumulator,
)
from sparsek_kernels.sink_window.spec import AttentionSpec

_SINK_PROGRAMS = 264  # two per multiprocessor of the largest GPUs


def launch_forward(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    spec: AttentionSpec,
    config: LaunchConfig | None = None,
) -> CompiledLaunch | None:
    """Run the forward kernel for checked arguments; ``lse`` is skipped when ``None``.

    Returns a handle that replays the launch for tensors of the same shapes and strides (taking
    the pointers of out, lse, q, k, v and sinks), where there is one.
    """
    if out.numel() == 0:
        return None
    call = Call(q, k, spec, cu_seqlens_q, cu_seqlens_k, config)
    hopper = call.config.hopper_forward
    if hopper is not None and k.numel() and describable(q, k, v):
        forward_hopper(call, hopper, out, lse, q, k, v, sinks, spec)
        return None
    small = call.config.hopper_small
    if small is not None and copyable(out, q, k, v):
        return forward_small(call, small, out, lse, q, k, v, sinks, spec)
    tile = call.config.forward
    grid, tiles = call.query_grid(tile.block_m)
    return launch(
        sink_window_fwd_kernel,
        grid,
        (
            out,
            lse if lse is not None else out,
            q,
            k,
            v,
            sinks if sinks is not None else q,
            call.cu_q,
            call.cu_k,
            tiles,
        ),
        (*call.scalars, *out.stride(), *q.stride(), *k.stride(), *v.stride(), *call.sizes),
        {
            **call.mask,
            "HAS_SINK_KEYS": spec.num_sink > 0,
            "HAS_SINKS": sinks is not None,
            "STORE_LSE": lse is not None,
            "VARLEN": call.varlen,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_S": call.config.sink_block,
            "BLOCK_D": call.shape.padded_dim,
            "PRECISION": call.config.precision,
            "NUM_STAGES": tile.num_stages,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def row_dots(dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``delta [B, Hq, N]`` fp32: row sums of ``out * dout``, less the gradient of the LSE."""
    batch, num_q, num_heads, dim = out.shape
    delta = torch.empty((batch, num_heads, num_q), dtype=torch.float32, device=out.device)
    block_d = max(16, triton.next_power_of_2(dim))
    block_m = max(1, 8192 // block_d)
    sink_window_bwd_delta_kernel[(triton.cdiv(num_q, block_m), num_heads, batch)](
        delta,
        out,
        dout,
        dlse.contiguous() if dlse is not None else delta,
        *out.stride(),
        *dout.stride(),
        num_q,
        num_heads,
        HEAD_DIM=dim,
        HAS_DLSE=dlse is not None,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return delta


def _sink_gradients(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq_acc: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unscaled ``dk`` and ``dv`` ``[sequences, Hkv, num_sink, D]`` from outside the window."""
    shape, tile = call.shape, call.config.sink
    sink_blocks = triton.cdiv(shape.num_sink, tile.block_n)
    seqs = call.num_seqs or 0
    longest = triton.cdiv(shape.num_q, 4 * tile.block_m)
    programs = max(seqs * shape.num_kv_heads * sink_blocks, 1)
    chunks = max(1, min(triton.cdiv(_SINK_PROGRAMS, programs), longest))
    part = torch.empty(
        (2, seqs, chunks, shape.num_kv_heads, shape.num_sink, shape.head_dim),
        dtype=torch.float32,
        device=q.device,
    )
    sink_window_bwd_sink_kernel[(chunks * sink_blocks, shape.num_kv_heads, seqs)](
        part[0],
        part[1],
        dq_acc if dq_acc is not None else delta,
        dout,
        q,
        k,
        v,
        lse,
        delta,
        call.cu_q,
        call.cu_k,
        *call.scalars,
        *dout.stride(),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *call.sizes,
        chunks,
        sink_blocks,
        GROUP=call.mask["GROUP"],
        HEAD_DIM=shape.head_dim,
        VARLEN=call.varlen,
        WRITE_DQ=dq_acc is not None,
        BLOCK_M=tile.block_m,
        BLOCK_S=tile.block_n,
        BLOCK_D=shape.padded_dim,
        PRECISION=call.config.precision,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    total = part.sum(dim=2) if chunks > 1 else part[:, :, 0]
    return total[0], total[1]


def _portable_gradients(
    call: Call,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> None:
    """Key-major and query-major kernels, which recompute the probabilities twice."""
    shape, config = call.shape, call.config
    has_sink_keys = shape.num_sink > 0
    sink_dk = sink_dv = delta
    if has_sink_keys:
        sink_dk, sink_dv = _sink_gradients(call, dout, q, k, v, lse, delta, None)
    inputs: tuple[Any, ...] = (dout, q, k, v, lse, delta)
    strides = (*dout.stride(), *q.stride(), *k.stride(), *v.stride())
    tile = config.dkdv
    grid, tiles = call.key_grid(tile.block_n)
    sink_window_bwd_dkdv_kernel[grid](
        dk,
        dv,
        *inputs,
        sink_dk,
        sink_dv,
        call.cu_q,
        call.cu_k,
        tiles,
        *call.scalars,
        *dk.stride()[:3],
        *dv.stride()[:3],
        *strides,
        *call.sizes,
        **call.mask,
        HAS_SINK_KEYS=has_sink_keys,
        VARLEN=call.varlen,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=shape.padded_dim,
        PRECISION=config.precision,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    tile = config.dq
    grid, tiles = call.query_grid(tile.block_m)
    sink_window_bwd_dq_kernel[grid](
        dq,
        *inputs,
        call.cu_q,
        call.cu_k,
        tiles,
        *call.scalars,
        *dq.stride()[:3],
        *strides,
        *call.sizes,
        **call.mask,
        HAS_SINK_KEYS=has_sink_keys,
        VARLEN=call.varlen,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_S=config.sink_block,
        BLOCK_D=shape.padded_dim,
        PRECISION=config.precision,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _fused_gradients(
    call: Call,
    tile: TileConfig,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> None:
    """One kernel for all three gradients, with ``dq`` summed in fp32 in memory.

    ``lse`` and ``delta`` are contiguous: of several sequences there are all heads.
    """
    shape = call.shape
    sink_grads = None
    if shape.num_sink:
        dims = (shape.batch, shape.num_heads, shape.num_q, shape.head_dim)
        dq_acc = torch.empty(dims, dtype=torch.float32, device=q.device)
        sink_grads = _sink_gradients(call, dout, q, k, v, lse, delta, dq_acc)
    else:
        dq_acc = new_accumulator(call, tile, q.device)
    backward_hopper(call, tile, dq_acc, dk, dv, dout, q, k, v, lse, delta, sink_grads)
    rows = 8192 // shape.padded_dim
    grid = (triton.cdiv(shape.num_q, rows), shape.num_heads, shape.batch)
    sink_window_bwd_finish_kernel[grid](
        dq,
        dq_acc,
        call.scalars[0],
        *dq.stride()[:3],
        shape.num_q,
        shape.num_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_M=rows,
        BLOCK_D=shape.padded_dim,
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
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    spec: AttentionSpec,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v and sinks for checked arguments; bitwise reproducible."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        for grad in (dq, dk, dv):
            grad.zero_()
    delta = row_dots(dout, dlse, out) if q.numel() else torch.zeros_like(lse)
    if q.numel() and k.numel():
        call = Call(q, k, spec, cu_seqlens_q, cu_seqlens_k, config)
        hopper = call.config.hopper_backward
        if hopper is not None and describable(q, k, v):
            if not describable(dout):
                dout = dout.contiguous()  # such as the expanded gradient of a sum
            for seqs, heads, kv_heads in accumulator_parts(call.shape):
                q_part, k_part = q[seqs, :, heads], k[seqs, :, kv_heads]
                _fused_gradients(
                    Call(q_part, k_part, spec, cu_seqlens_q, cu_seqlens_k, call.config),
                    hopper,
                    dq[seqs, :, heads],
                    dk[seqs, :, kv_heads],
                    dv[seqs, :, kv_heads],
                    dout[seqs, :, heads],
                    q_part,
                    k_part,
                    v[seqs, :, kv_heads],
                    lse[seqs, heads],
                    delta[seqs, heads],
                )
        else:
            _portable_gradients(call, dq, dk, dv, dout, q, k, v, lse, delta)
    dsinks = None
    if sinks is not None:
        mass = torch.exp(sinks.to(torch.float32)[None, :, None] - lse)
        dsinks = -(mass * delta).sum(dim=(0, 2)).to(sinks.dtype)
    return dq, dk, dv, dsinks

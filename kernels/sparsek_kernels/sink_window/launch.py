"""Launches of the sink-window kernels: configuration, grids, strides and scratch tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsek_kernels.common.alignment import copyable, describable
from sparsek_kernels.common.grids import query_grid, tile_grid
from sparsek_kernels.common.operators import new_like, pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.row_dots import row_dots
from sparsek_kernels.common.shapes import cdiv, strides
from sparsek_kernels.sink_window import launch_sm90
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig, accumulator_parts
from sparsek_kernels.sink_window.kernels.bwd import (
    sink_window_bwd_dkdv_kernel,
    sink_window_bwd_dq_kernel,
)
from sparsek_kernels.sink_window.kernels.bwd_sink import sink_window_bwd_sink_kernel
from sparsek_kernels.sink_window.kernels.fwd import sink_window_fwd_kernel
from sparsek_kernels.sink_window.problem import KeyTerms, SinkWindowProblem, term_arguments
from sparsek_kernels.sink_window.spec import MOST_SEQUENCES
from sparsek_kernels.sink_window.torch_path import sink_gradient

_SINK_PROGRAMS = 264  # two per multiprocessor of the largest GPUs


def _in_parts(problem: SinkWindowProblem) -> list[tuple[slice, SinkWindowProblem]]:
    """The batch entries of each launch, and the problem that they are."""
    q, k, v = problem.q, problem.k, problem.v
    starts = range(0, q.shape[0], MOST_SEQUENCES)
    parts = [slice(first, first + MOST_SEQUENCES) for first in starts]
    return [(x, replace(problem, q=q[x], k=k[x], v=v[x])) for x in parts]


def forward(
    problem: SinkWindowProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: LaunchConfig | None = None,
) -> None:
    """Write ``out`` and, where given, ``lse``; ``config`` is the table's unless given."""
    if out.numel() == 0:
        return
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    config = config or problem.launch_config()
    if shape.batch > MOST_SEQUENCES:
        for part, some in _in_parts(problem):
            forward(some, out[part], None if lse is None else lse[part], config)
        return
    hopper, small, tile = config.hopper_forward, config.hopper_small, config.forward
    if hopper is not None and k.numel() and describable(q, k, v):
        launch_sm90.forward(problem, config, hopper, out, lse)
        return
    if small is not None and copyable(out, q, k, v):
        launch_sm90.forward_small(problem, small, out, lse)
        return
    grid, tiles = query_grid(shape, problem.cu_seqlens_q, tile.block_m)
    run(
        sink_window_fwd_kernel, grid,
        out, *pointers(out, lse), q, k, v, *pointers(q, problem.sinks), *problem.offsets,
        *pointers(q, tiles),
        problem.spec.softmax_scale, *problem.window, *strides(out, q, k, v), *problem.sizes,
        **shape.mask_rules, HAS_SINK_KEYS=shape.num_sink > 0, HAS_SINKS=problem.sinks is not None,
        STORE_LSE=lse is not None, VARLEN=problem.varlen, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_S=config.sink_block, BLOCK_D=shape.padded_dim,
        PRECISION=config.precision, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _sink_gradients(
    problem: SinkWindowProblem,
    config: LaunchConfig,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq_acc: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unscaled ``dk`` and ``dv`` ``[sequences, Hkv, num_sink, D]`` from outside the window."""
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    tile = config.sink
    sink_blocks = cdiv(shape.num_sink, tile.block_n)
    seqs = shape.batch if shape.num_seqs is None else shape.num_seqs
    longest = cdiv(shape.num_q, 4 * tile.block_m)
    programs = max(seqs * shape.num_kv_heads * sink_blocks, 1)
    chunks = max(1, min(cdiv(_SINK_PROGRAMS, programs), longest))
    size = (2, seqs, chunks, shape.num_kv_heads, shape.num_sink, shape.head_dim)
    part = torch.empty(size, dtype=torch.float32, device=q.device)
    sink_window_bwd_sink_kernel[(chunks * sink_blocks, shape.num_kv_heads, seqs)](
        part[0], part[1], *pointers(delta, dq_acc), dout, q, k, v, lse, delta, *problem.offsets,
        problem.spec.softmax_scale, *problem.window, *strides(dout, q, k, v),
        *problem.sizes, chunks, sink_blocks,
        GROUP=shape.group, HEAD_DIM=shape.head_dim, VARLEN=problem.varlen,
        WRITE_DQ=dq_acc is not None, BLOCK_M=tile.block_m, BLOCK_S=tile.block_n,
        BLOCK_D=shape.padded_dim, PRECISION=config.precision, **tile.pipeline,
    )  # fmt: skip
    total = part.sum(dim=2) if chunks > 1 else part[:, :, 0]
    return total[0], total[1]


def _portable_gradients(
    problem: SinkWindowProblem,
    config: LaunchConfig,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    terms: KeyTerms | None,
) -> None:
    """Fill ``dq, dk, dv`` with a key-major and a query-major kernel, each with its own scores."""
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    dq, dk, dv = grads
    sink_dk = sink_dv = delta
    if shape.num_sink:
        sink_dk, sink_dv = _sink_gradients(problem, config, dout, lse, delta, None)
    inputs = (dout, q, k, v, lse, delta)
    scalars = (problem.spec.softmax_scale, *problem.window)
    tail = (*strides(dout, q, k, v), *problem.sizes)
    rules = {
        **shape.mask_rules,
        "HAS_SINK_KEYS": shape.num_sink > 0,
        "VARLEN": problem.varlen,
        "BLOCK_D": shape.padded_dim,
        "PRECISION": config.precision,
    }
    tile = config.dkdv
    grid, tiles = tile_grid(
        problem.cu_seqlens_k, shape.num_k, tile.block_n, shape.num_kv_heads, shape.batch
    )
    term_grads, term_strides, slots = term_arguments(terms, delta)
    sink_window_bwd_dkdv_kernel[grid](
        dk, dv, *term_grads, *inputs, sink_dk, sink_dv, *problem.offsets, *pointers(q, tiles),
        slots, *scalars, *strides(dk, dv, dims=3), *term_strides, *tail,
        **rules, HAS_TERMS=terms is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **tile.pipeline,
    )  # fmt: skip
    tile = config.dq
    grid, tiles = query_grid(shape, problem.cu_seqlens_q, tile.block_m)
    sink_window_bwd_dq_kernel[grid](
        dq, *inputs, *problem.offsets, *pointers(q, tiles), *scalars, *strides(dq, dims=3), *tail,
        **rules, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_S=config.sink_block,
        **tile.pipeline,
    )  # fmt: skip


def _fused_gradients(
    problem: SinkWindowProblem,
    config: LaunchConfig,
    tile: TileConfig,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    terms: KeyTerms | None,
) -> None:
    """Fill ``dq, dk, dv`` with one kernel, which sums ``dq`` in fp32 in memory.

    ``lse`` and ``delta`` are contiguous: of several sequences there are all heads.
    """
    dq, dk, dv = grads
    sink_grads = None
    if problem.shape.num_sink:
        batch, num_q, num_heads, head_dim = dq.shape
        dims = (batch, num_heads, num_q, head_dim)
        dq_acc = torch.empty(dims, dtype=torch.float32, device=dq.device)
        sink_grads = _sink_gradients(problem, config, dout, lse, delta, dq_acc)
    else:
        dq_acc = launch_sm90.new_accumulator(problem, tile)
    launch_sm90.backward(
        problem,
        tile,
        config.backward_together,
        dq_acc,
        dk,
        dv,
        dout,
        lse,
        delta,
        sink_grads,
        terms=terms,
    )
    launch_sm90.finish_dq(dq, dq_acc, problem.spec.softmax_scale)


def backward(
    problem: SinkWindowProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    config: LaunchConfig | None = None,
    terms: KeyTerms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v and sinks; bitwise reproducible.  ``terms`` are filled."""
    q, k, v, sinks = problem.q, problem.k, problem.v, problem.sinks
    config = config or problem.launch_config()
    if q.shape[0] > MOST_SEQUENCES:
        parts = [
            backward(
                some,
                out[x],
                lse[x],
                dout[x],
                None if dlse is None else dlse[x],
                config,
                None if terms is None else terms.of(x),
            )
            for x, some in _in_parts(problem)
        ]
        dq, dk, dv = (torch.cat(x) for x in zip(*(part[:3] for part in parts), strict=True))
        of_sinks = [x for *_, x in parts if x is not None]
        return dq, dk, dv, torch.stack(of_sinks).sum(0) if of_sinks else None
    dq, dk, dv = new_like(q), new_like(k), new_like(v)
    delta = row_dots(dout, dlse, out) if q.numel() else torch.zeros_like(lse)
    hopper = config.hopper_backward
    if q.numel() == 0 or k.numel() == 0:
        for grad in (dq, dk, dv):
            grad.zero_()
        if terms is not None:
            terms.grads.zero_()
    elif hopper is not None and describable(q, k, v):
        if not describable(dout):
            dout = dout.contiguous()  # such as the expanded gradient of a sum
        for seqs, heads, kv_heads in accumulator_parts(problem.shape):
            rows, keys = (seqs, slice(None), heads), (seqs, slice(None), kv_heads)
            _fused_gradients(
                replace(problem, q=q[rows], k=k[keys], v=v[keys]),
                config,
                hopper,
                (dq[rows], dk[keys], dv[keys]),
                dout[rows],
                lse[seqs, heads],
                delta[seqs, heads],
                None if terms is None else terms.of(seqs, kv_heads),
            )
    else:
        _portable_gradients(problem, config, (dq, dk, dv), dout, lse, delta, terms)
    return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, delta)

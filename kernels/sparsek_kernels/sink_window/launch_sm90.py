"""Launches of the Hopper kernels: tensor descriptors, persistent grid, scratch tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparsek_kernels.common.descriptors import describe
from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.grids import query_grid, tile_grid
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv, next_power_of_2, octet_strides
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig
from sparsek_kernels.sink_window.kernels.bwd_rows import sink_window_bwd_finish_kernel
from sparsek_kernels.sink_window.kernels.bwd_sm90 import sink_window_hopper_bwd_kernel
from sparsek_kernels.sink_window.kernels.fwd_sm90 import sink_window_hopper_fwd_kernel
from sparsek_kernels.sink_window.kernels.fwd_small_sm90 import sink_window_hopper_small_kernel
from sparsek_kernels.sink_window.problem import KeyTerms, SinkWindowProblem, term_arguments

_WARPGROUP_ROWS = 64


def forward_rules(tile: TileConfig) -> dict[str, int | bool]:
    """Constexprs for the tiles of the warp-specialised forward kernel and for their buffers."""
    return {
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "PAIRED": tile.block_m == _WARPGROUP_ROWS,
        "HOLD_Q": tile.hold_q,
    }


def forward(
    problem: SinkWindowProblem,
    config: LaunchConfig,
    tile: TileConfig,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run the warp-specialised forward kernel."""
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    rules = forward_rules(tile)
    (blocks, heads, batch), tiles = query_grid(shape, problem.cu_seqlens_q, tile.block_m)
    num_tiles = blocks * (heads // 2 if rules["PAIRED"] else heads) * batch
    q_desc, q_rows, q_cols = describe(q, _WARPGROUP_ROWS)
    k_desc, k_rows, k_cols = describe(k, tile.block_n)
    v_desc, v_rows, v_cols = describe(v, tile.block_n)
    sink_k_desc, sink_v_desc = k_desc, v_desc
    if shape.num_sink:
        sink_k_desc, sink_v_desc = (describe(x, config.sink_block)[0] for x in (k, v))
    run(
        sink_window_hopper_fwd_kernel, (min(num_tiles, multiprocessors(q.device)),),
        out, *pointers(out, lse), q_desc, k_desc, v_desc, sink_k_desc, sink_v_desc,
        *pointers(q, problem.sinks), *problem.offsets, *pointers(q, tiles),
        problem.spec.softmax_scale * LOG2E.value, *problem.window, *out.stride()[:3],
        q_rows, k_rows, v_rows, q_cols, k_cols, v_cols, *problem.sizes, blocks, num_tiles,
        **shape.mask_rules, HAS_SINK_KEYS=shape.num_sink > 0, HAS_SINKS=problem.sinks is not None,
        STORE_LSE=lse is not None, VARLEN=problem.varlen, **rules, BLOCK_S=config.sink_block,
        heads_together=math.gcd(shape.num_kv_heads * batch, config.forward_together),
        num_warps=tile.num_warps,
    )  # fmt: skip


def forward_small(
    problem: SinkWindowProblem, tile: TileConfig, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Run the kernel for few rows, without waiting for the kernel ahead of it to end."""
    q, k, v, sinks, shape = problem.q, problem.k, problem.v, problem.sinks, problem.shape
    grid, _ = query_grid(shape, None, tile.block_m)
    run(
        sink_window_hopper_small_kernel, grid,
        out, *pointers(out, lse), q, k, v, *pointers(q, sinks),
        problem.spec.softmax_scale * LOG2E.value, *octet_strides(out, q, k, v), *problem.sizes,
        GROUP=shape.group, HEAD_DIM=shape.head_dim, CAUSAL=shape.causal,
        HAS_SINKS=sinks is not None, STORE_LSE=lse is not None, BLOCK_N=tile.block_n,
        CHUNKS=tile.num_stages, num_warps=tile.num_warps, launch_pdl=True,
    )  # fmt: skip


@dataclass(frozen=True)
class CompressedKeys:
    """Keys that stand for blocks of tokens; their queries are taken in segments.

    Each segment writes its own gradients of keys and values.
    """

    block_size: int  # tokens of a key
    stride: int  # tokens from one key to the next
    num_segments: int
    segment_rows: int  # queries of a segment, a multiple of the tokens of a tile of keys
    gradient_stride: int  # elements between the gradients of two neighbouring segments


def _overwrites(problem: SinkWindowProblem, tile: TileConfig) -> bool:
    """Whether every query block gets a tile of the fused backward kernel that no other overlaps."""
    shape = problem.shape
    whole = shape.num_q % tile.block_m == 0 and shape.num_k >= shape.num_q
    return whole and not problem.varlen and shape.num_sink == 0


def new_accumulator(problem: SinkWindowProblem, tile: TileConfig) -> torch.Tensor:
    """fp32 ``dq_acc [B, Hq, N, D]`` for :func:`backward`: zeros where that one only adds."""
    shape = problem.shape
    new = torch.empty if _overwrites(problem, tile) else torch.zeros
    dims = (shape.batch, shape.num_heads, shape.num_q, shape.head_dim)
    return new(dims, dtype=torch.float32, device=problem.q.device)


def backward(
    problem: SinkWindowProblem,
    tile: TileConfig,
    heads_together: int,
    dq_acc: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    sink_grads: tuple[torch.Tensor, torch.Tensor] | None = None,
    compressed: CompressedKeys | None = None,
    terms: KeyTerms | None = None,
) -> None:
    """Run the fused backward kernel: fill ``dk`` and ``dv``, add the unscaled ``dq`` to ``dq_acc``.

    Inputs and ``dout`` are ``describable``, ``lse`` and ``delta`` contiguous; ``dv`` has the
    strides of ``dk``.

    Args:
        heads_together: KV heads that programs work on side by side.
        dq_acc: fp32 ``[B, Hq, N, D]``: a :func:`new_accumulator`, zeros, or a sum to add to.
        delta: ``[B, Hq, N]`` row sums of ``out * dout``.
        sink_grads: ``dk`` and ``dv`` of sink keys, from queries whose window has passed them.
        compressed: given where keys are compressed blocks of tokens; ``dk`` and ``dv`` are then
            the gradients from the first segment of queries.
        terms: filled where given.
    """
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    (blocks, heads, batch), tiles = tile_grid(
        problem.cu_seqlens_k, shape.num_k, tile.block_n, shape.num_kv_heads, shape.batch
    )
    keys = compressed or CompressedKeys(1, 1, 1, shape.num_q + tile.block_m, 0)
    order_blocks = shape.num_q // tile.block_m + (shape.num_seqs or 0) + 1
    # Key blocks announced per query block, and the ticket counter behind them.
    order = torch.zeros(
        shape.batch * shape.num_heads * order_blocks + 4, dtype=torch.int32, device=q.device
    )
    q_desc, q_rows, q_cols = describe(q, tile.block_m)
    g_desc, g_rows, g_cols = describe(dout, tile.block_m)
    k_desc, k_rows, k_cols = describe(k, tile.block_n)
    v_desc, v_rows, v_cols = describe(v, tile.block_n)
    term_grads, term_strides, slots = term_arguments(terms, delta)
    dq_desc, _, _ = describe(dq_acc.view(1, -1, 1, shape.head_dim), tile.block_m)
    run(
        sink_window_hopper_bwd_kernel, (blocks * heads * batch * keys.num_segments,),
        dk, dv, *term_grads, order, order[-4:], dq_desc, q_desc, g_desc, k_desc, v_desc, lse,
        delta, *(sink_grads or (delta, delta)), *problem.offsets, *pointers(q, tiles), slots,
        problem.spec.softmax_scale, *problem.window, *dk.stride()[:3], *term_strides,
        q_rows, g_rows, k_rows, v_rows, q_cols, g_cols, k_cols, v_cols, *problem.sizes,
        blocks, order_blocks, math.gcd(heads * batch, heads_together),
        keys.num_segments, keys.segment_rows, keys.gradient_stride,
        **shape.mask_rules, HAS_SINK_KEYS=sink_grads is not None, HAS_TERMS=terms is not None,
        VARLEN=problem.varlen, OVERWRITES=compressed is None and _overwrites(problem, tile),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, Q_STAGES=tile.num_stages, G_STAGES=2,
        KEY_BLOCK=keys.block_size, KEY_STRIDE=keys.stride, num_warps=tile.num_warps,
    )  # fmt: skip


def finish_dq(dq: torch.Tensor, dq_acc: torch.Tensor, scale: float) -> None:
    """Write ``dq [B, N, Hq, D] = scale * dq_acc``, from the sum ``[B, Hq, N, D]``."""
    batch, num_q, num_heads, head_dim = dq.shape
    padded_dim = next_power_of_2(head_dim)
    rows = 8192 // padded_dim
    run(
        sink_window_bwd_finish_kernel, (cdiv(num_q, rows), num_heads, batch),
        dq, dq_acc, scale,
        *dq.stride()[:3],
        num_q, num_heads,
        HEAD_DIM=head_dim, BLOCK_M=rows, BLOCK_D=padded_dim, num_warps=4,
    )  # fmt: skip

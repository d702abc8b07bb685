"""Launches of attention over compressed blocks on Hopper.

The sink-window kernel computes the backward pass: its keys may stand for blocks of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.common.alignment import describable
from sparsek_kernels.common.descriptors import describe
from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.grids import tile_grid
from sparsek_kernels.common.kernels.softmax import LOG2E
from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import cdiv
from sparsek_kernels.nsa.compressed.kernels.block_sums_sm90 import KEYS
from sparsek_kernels.nsa.compressed.kernels.fwd_load_sm90 import (
    BOUND_BF16,
    BOUND_FP16,
    nsa_arrange_kernel,
)
from sparsek_kernels.nsa.compressed.kernels.fwd_sm90 import nsa_compressed_hopper_fwd_kernel
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import TileConfig
from sparsek_kernels.sink_window import launch_sm90 as launch_window
from sparsek_kernels.sink_window.config import TileConfig as SinkWindowTile
from sparsek_kernels.sink_window.problem import SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec

_LEAST_PROGRAMS = 1024  # of the backward pass: the last ones to run then cost little
_HEADS_TOGETHER = 16
_MOST_SEGMENTS = 32


@dataclass(frozen=True)
class Arranged:
    """Compressed keys and values in the order of the forward kernel (``arranged_key``)."""

    k: torch.Tensor  # [B, whole tiles, Hkv, D], permuted within each tile
    v: torch.Tensor  # the same
    longest: torch.Tensor  # [2] fp32, norms of the longest key and of the longest sampled query


@dataclass(frozen=True)
class BlockSums:
    """Sums of attention weights over selection blocks, from which block scores are made."""

    words: torch.Tensor  # [B, rows, Hq, pitch, 16] int32, flat; each holds two sums of 16 bits
    maxima: torch.Tensor  # [B, rows, Hq, pitch] fp32, flat; base-2 logarithms that sums refer to
    first: int  # row of q from which on the sums are
    rows: int  # number of rows
    pitch: int  # tiles of 32 blocks per row


def arrange(problem: CompressedProblem) -> Arranged:
    """Arranged copies of the compressed keys and values."""
    q, cu_cmp = problem.q, problem.cu_cmp
    batch, rows, heads, dim = problem.k_cmp.shape
    (num_tiles, _, _), tiles = tile_grid(cu_cmp, rows, KEYS.value, heads, batch)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (problem.k_cmp, problem.v_cmp))
    found = (batch, num_tiles * KEYS.value, heads, dim)
    k_out = torch.empty(found, dtype=k.dtype, device=k.device)
    # A packed sequence without a block has a tile that no program writes.  Its weights are zero,
    # so its values must be finite.
    v_out = (torch.empty if cu_cmp is None else torch.zeros)(found, dtype=v.dtype, device=v.device)
    longest = torch.zeros(2, dtype=torch.float32, device=k.device)
    run(
        nsa_arrange_kernel, (num_tiles, heads, batch),
        k_out, v_out, longest, k, v, q, *pointers(problem.q, problem.cu_seqlens, cu_cmp, tiles),
        *k.stride()[:3], *v.stride()[:3], *q.stride()[:3],
        rows, q.shape[1], found[1],
        GROUP=problem.shape.group, HEAD_DIM=dim, VARLEN=cu_cmp is not None, num_warps=8,
    )  # fmt: skip
    return Arranged(k_out, v_out, longest)


def forward(
    problem: CompressedProblem,
    tile: TileConfig,
    keys: Arranged,
    out: torch.Tensor,
    lse: torch.Tensor,
    sums: BlockSums | None = None,
) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``, or the rows of ``sums``."""
    q, shape, cu_seqlens = problem.q, problem.shape, problem.cu_seqlens
    first, rows = (0, shape.num_q) if sums is None else (sums.first, sums.rows)
    cu_rows = None if cu_seqlens is None else cu_seqlens.clamp(first, first + rows)
    (blocks, heads, batch), tiles = tile_grid(
        cu_rows, rows, tile.block_m, shape.num_heads, shape.batch
    )
    num_tiles = blocks * heads * batch
    q_desc, q_rows, q_cols = describe(q, tile.block_m // 2)
    k_desc, k_rows, _ = describe(keys.k, KEYS.value)
    v_desc, _, _ = describe(keys.v, KEYS.value)
    left = torch.zeros(num_tiles + 1, dtype=torch.int32, device=q.device)
    bound = BOUND_BF16.value if q.dtype == torch.bfloat16 else BOUND_FP16.value
    for bounded in (True, False):
        run(
            nsa_compressed_hopper_fwd_kernel, (min(num_tiles, multiprocessors(q.device)),),
            out, lse, out if sums is None else sums.words, lse if sums is None else sums.maxima,
            keys.longest, left, q_desc, k_desc, v_desc,
            *pointers(problem.q, cu_rows, cu_seqlens, problem.cu_cmp, tiles),
            problem.softmax_scale * LOG2E.value, q_rows, q_cols, k_rows, first, rows, shape.num_q,
            shape.num_heads, 0 if sums is None else sums.pitch, blocks, num_tiles,
            **problem.rules, SUMS=sums is not None, BOUNDED=bounded, BOUND=bound,
            STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip


def _share(group: int, programs: int) -> int:
    """Query heads of a group that one program serves: few enough to make many programs."""
    share = group
    while programs * (group // share) < _LEAST_PROGRAMS and share > 1:
        share = max(x for x in range(1, share) if group % x == 0)
    return share


def query_segments(num_q: int, span: int) -> tuple[int, int]:
    """``(segments, rows of a segment)`` of queries in the backward pass, a multiple of ``span``.

    ``span`` is the tokens of a tile of keys.  Every segment writes gradients of keys and values of
    its own, hence few segments.
    """
    rows = cdiv(cdiv(num_q, _MOST_SEGMENTS), span) * span
    return cdiv(num_q, rows), rows


def accumulate(
    problem: CompressedProblem,
    tile: SinkWindowTile,
    dq_acc: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add unscaled ``dq`` to fp32 ``dq_acc [B, Hq, N, D]``; the gradients of k_cmp and v_cmp."""
    k_cmp, v_cmp, spec = problem.k_cmp, problem.v_cmp, problem.spec
    shape, cu_seqlens, cu_cmp = problem.shape, problem.cu_seqlens, problem.cu_cmp
    batch, rows, num_kv_heads, head_dim = k_cmp.shape
    span = tile.block_n * spec.cmp_stride
    segments, segment_rows = query_segments(shape.num_q, span)
    if cu_seqlens is not None:  # sequences of any length
        segments, segment_rows = 1, shape.num_q + tile.block_m
    seen = cdiv(rows, tile.block_n) * (segments + 1) // 2  # key tiles, in all segments
    share = _share(shape.group, seen * num_kv_heads * batch)
    parts = shape.group // share
    # Each part of a group gets keys, values and gradients of its own.
    k, v = (x.repeat_interleave(parts, 2) if parts > 1 else x for x in (k_cmp, v_cmp))
    new = torch.empty if cu_cmp is None else torch.zeros  # packed: rows of no sequence
    dk, dv = (new((segments, *x.shape), dtype=x.dtype, device=x.device) for x in (k, v))
    causal = AttentionSpec(0, None, True, problem.softmax_scale)
    window = SinkWindowProblem(problem.q, k, v, causal, None, cu_seqlens, cu_cmp)
    keys = launch_window.CompressedKeys(
        spec.cmp_block_size, spec.cmp_stride, segments, segment_rows, dk.stride(0)
    )
    launch_window.backward(
        window, tile, _HEADS_TOGETHER, dq_acc, dk[0], dv[0], dout, lse, delta, compressed=keys
    )
    if segments * parts == 1:
        return dk[0], dv[0]
    split = (segments, batch, rows, num_kv_heads, parts, head_dim)
    dk, dv = (x.view(split).sum((0, 4)) for x in (dk, dv))  # in fp32, rounded once
    return dk, dv


def backward(
    problem: CompressedProblem,
    tile: SinkWindowTile,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp; bitwise reproducible."""
    q, shape = problem.q, problem.shape
    if not describable(dout):
        dout = dout.contiguous()
    dims = (shape.batch, shape.num_heads, shape.num_q, shape.head_dim)
    dq_acc = torch.zeros(dims, dtype=torch.float32, device=q.device)
    dk, dv = accumulate(problem, tile, dq_acc, dout, lse, delta)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_window.finish_dq(dq, dq_acc, problem.softmax_scale)
    return dq, dk, dv

"""Launches of attention over compressed blocks on Hopper.

The backward pass is that of the sliding window, whose keys stand for one token each; here they
stand for blocks, and nothing else differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from sparsek_kernels.common.descriptors import describable, describe, multiprocessors
from sparsek_kernels.nsa.compressed.kernels.block_sums_sm90 import KEYS
from sparsek_kernels.nsa.compressed.kernels.fwd_load_sm90 import (
    BOUND_BF16,
    BOUND_FP16,
    nsa_arrange_kernel,
)
from sparsek_kernels.nsa.compressed.kernels.fwd_sm90 import nsa_compressed_hopper_fwd_kernel
from sparsek_kernels.nsa.config import ProblemShape, TileConfig
from sparsek_kernels.nsa.launching import tile_grid
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window.kernels.bwd_rows import sink_window_bwd_finish_kernel
from sparsek_kernels.sink_window.kernels.bwd_sm90 import sink_window_hopper_bwd_kernel

_LOG2_E = 1.4426950408889634
_LEAST_PROGRAMS = 1024  # of the backward pass, so that the last of them hardly count
_HEADS_TOGETHER = 16
_MOST_SEGMENTS = 32


@dataclass(frozen=True)
class Arranged:
    """Compressed keys and values as the forward kernel wants them.

    Args:
        k: ``[B, whole tiles, Hkv, D]``, each tile in another order.
        v: likewise.
        longest: ``[2]`` fp32, the lengths of the longest key and of the longest of some query rows.
    """

    k: torch.Tensor
    v: torch.Tensor
    longest: torch.Tensor


@dataclass(frozen=True)
class BlockSums:
    """Sums of weights that some rows of queries leave for the choice of blocks.

    Args:
        words: ``[B, rows, Hq, pitch, 16]`` int32, flat and two sums each.
        maxima: ``[B, rows, Hq, pitch]`` fp32, flat, what sums are relative to, in base 2.
        first: the first of the rows.
        rows: how many there are.
        pitch: tiles of 32 blocks.
    """

    words: torch.Tensor
    maxima: torch.Tensor
    first: int
    rows: int
    pitch: int


def kernel_rules(shape: ProblemShape, spec: NSASpec, varlen: bool) -> dict[str, int | bool]:
    return {
        "HEAD_DIM": shape.head_dim,
        "CAUSAL": True,
        "WINDOWED": False,
        "HAS_SINK_KEYS": False,
        "VARLEN": varlen,
        "KEY_BLOCK": spec.cmp_block_size,
        "KEY_STRIDE": spec.cmp_stride,
    }


def arrange(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_cmp: torch.Tensor | None,
) -> Arranged:
    """Copies in the order that the forward kernel wants."""
    batch, rows, heads, dim = k_cmp.shape
    (num_tiles, _, _), tiles = tile_grid(cu_cmp, rows, KEYS.value, heads, batch)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k_cmp, v_cmp))
    found = (batch, num_tiles * KEYS.value, heads, dim)
    k_out = torch.empty(found, dtype=k.dtype, device=k.device)
    # A packed sequence too short for a block has a tile that nobody writes; its weights are zero.
    v_out = (torch.empty if cu_cmp is None else torch.zeros)(found, dtype=v.dtype, device=v.device)
    longest = torch.zeros(2, dtype=torch.float32, device=k.device)
    nsa_arrange_kernel[(num_tiles, heads, batch)](
        k_out,
        v_out,
        longest,
        k,
        v,
        q,
        *(q if x is None else x for x in (cu_seqlens, cu_cmp, tiles)),
        *k.stride()[:3],
        *v.stride()[:3],
        *q.stride()[:3],
        rows,
        q.shape[1],
        found[1],
        GROUP=q.shape[2] // heads,
        HEAD_DIM=dim,
        VARLEN=cu_cmp is not None,
        num_warps=8,
    )
    return Arranged(k_out, v_out, longest)


def forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys: Arranged,
    cu_seqlens: torch.Tensor | None,
    cu_cmp: torch.Tensor | None,
    shape: ProblemShape,
    tile: TileConfig,
    spec: NSASpec,
    scale: float,
    sums: BlockSums | None = None,
) -> None:
    """Fill contiguous ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``, or the rows of ``sums``."""
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
        nsa_compressed_hopper_fwd_kernel[(min(num_tiles, multiprocessors(q.device)),)](
            out,
            lse,
            out if sums is None else sums.words,
            lse if sums is None else sums.maxima,
            keys.longest,
            left,
            q_desc,
            k_desc,
            v_desc,
            *(q if x is None else x for x in (cu_rows, cu_seqlens, cu_cmp, tiles)),
            scale * _LOG2_E,
            q_rows,
            q_cols,
            k_rows,
            first,
            rows,
            shape.num_q,
            shape.num_heads,
            0 if sums is None else sums.pitch,
            blocks,
            num_tiles,
            GROUP=shape.group,
            HEAD_DIM=shape.head_dim,
            CMP_BLOCK=spec.cmp_block_size,
            CMP_STRIDE=spec.cmp_stride,
            SUMS=sums is not None,
            BOUNDED=bounded,
            BOUND=bound,
            VARLEN=cu_seqlens is not None,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


def _share(group: int, programs: int) -> int:
    """Query heads of a group that one program serves: few enough to make many programs."""
    share = group
    while programs * (group // share) < _LEAST_PROGRAMS and share > 1:
        share = max(x for x in range(1, share) if group % x == 0)
    return share


def query_segments(num_q: int, span: int) -> tuple[int, int]:
    """Segments of queries in the backward pass, and their rows: whole key tiles, ``span`` tokens.

    Each has gradients of keys and values of its own, hence few of them.
    """
    rows = triton.cdiv(triton.cdiv(num_q, _MOST_SEGMENTS), span) * span
    return triton.cdiv(num_q, rows), rows


def accumulate(
    dq_acc: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_cmp: torch.Tensor | None,
    shape: ProblemShape,
    tile: TileConfig,
    spec: NSASpec,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add unscaled ``dq`` to fp32 ``dq_acc [B, Hq, N, D]``; the gradients of k_cmp and v_cmp."""
    batch, rows, num_kv_heads, head_dim = k_cmp.shape
    span = tile.block_n * spec.cmp_stride
    segments, segment_rows = query_segments(shape.num_q, span)
    if cu_seqlens is not None:  # sequences of any length
        segments, segment_rows = 1, shape.num_q + tile.block_m
    seen = triton.cdiv(rows, tile.block_n) * (segments + 1) // 2  # key tiles, in all segments
    share = _share(shape.group, seen * num_kv_heads * batch)
    parts = shape.group // share
    # Each part of a group gets keys, values and gradients of its own.
    k, v = (x.repeat_interleave(parts, 2) if parts > 1 else x for x in (k_cmp, v_cmp))
    heads = num_kv_heads * parts
    new = torch.empty if cu_cmp is None else torch.zeros  # packed: rows of no sequence
    dk, dv = (new((segments, *x.shape), dtype=x.dtype, device=x.device) for x in (k, v))
    (blocks, _, _), tiles = tile_grid(cu_cmp, rows, tile.block_n, heads, batch)
    seqs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    order_blocks = shape.num_q // tile.block_m + seqs + 1
    # Key blocks announced per query block, and the ticket counter behind them.
    order = torch.zeros(
        batch * shape.num_heads * order_blocks + 4, dtype=torch.int32, device=q.device
    )
    q_desc, q_rows, q_cols = describe(q, tile.block_m)
    g_desc, g_rows, g_cols = describe(dout, tile.block_m)
    k_desc, k_rows, k_cols = describe(k, tile.block_n)
    v_desc, v_rows, v_cols = describe(v, tile.block_n)
    dq_desc, _, _ = describe(dq_acc.view(1, -1, 1, head_dim), tile.block_m)
    sink_window_hopper_bwd_kernel[(blocks * heads * batch * segments,)](
        dk,
        dv,
        order,
        order[-4:],
        dq_desc,
        q_desc,
        g_desc,
        k_desc,
        v_desc,
        lse,
        delta,
        delta,
        delta,
        q if cu_seqlens is None else cu_seqlens,
        q if cu_cmp is None else cu_cmp,
        q if tiles is None else tiles,
        scale,
        0,
        0,
        *dk.stride()[1:4],
        q_rows,
        g_rows,
        k_rows,
        v_rows,
        q_cols,
        g_cols,
        k_cols,
        v_cols,
        shape.num_q,
        rows,
        shape.num_heads,
        blocks,
        order_blocks,
        math.gcd(heads * batch, _HEADS_TOGETHER),
        segments,
        segment_rows,
        dk.stride(0),
        **kernel_rules(shape, spec, cu_seqlens is not None),
        GROUP=share,
        OVERWRITES=False,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        Q_STAGES=tile.num_stages,
        G_STAGES=2,
        num_warps=tile.num_warps,
    )
    if segments * parts == 1:
        return dk[0], dv[0]
    split = (segments, batch, rows, num_kv_heads, parts, head_dim)
    dk, dv = (x.view(split).sum((0, 4), dtype=torch.float32).to(x.dtype) for x in (dk, dv))
    return dk, dv


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_cmp: torch.Tensor | None,
    shape: ProblemShape,
    tile: TileConfig,
    spec: NSASpec,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k_cmp and v_cmp; bitwise reproducible."""
    if not describable(dout):
        dout = dout.contiguous()
    dims = (shape.batch, shape.num_heads, shape.num_q, shape.head_dim)
    dq_acc = torch.zeros(dims, dtype=torch.float32, device=q.device)
    dk, dv = accumulate(
        *(dq_acc, dout, q, k_cmp, v_cmp, lse, delta),
        *(cu_seqlens, cu_cmp, shape, tile, spec, scale),
    )
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = 8192 // shape.padded_dim
    grid = (triton.cdiv(shape.num_q, step), shape.num_heads, shape.batch)
    sink_window_bwd_finish_kernel[grid](
        dq,
        dq_acc,
        scale,
        *dq.stride()[:3],
        shape.num_q,
        shape.num_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_M=step,
        BLOCK_D=shape.padded_dim,
        num_warps=4,
    )
    return dq, dk, dv

"""Sink + sliding-window attention in torch operations, for CPU tensors and for fp64.

Queries are handled a block at a time against the keys that the block touches, so memory is
O(block x window), time O(N x window), and the gradient is written out rather than recorded.
Half-precision inputs are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from sparsek_kernels.common.precision import compute_dtype, row_sums, softmax_, without_autocast
from sparsek_kernels.sink_window.problem import SinkWindowProblem

_BLOCK_SCORES = 1 << 22  # scores held at once, whatever the shapes


@dataclass(frozen=True)
class _Block:
    """Query rows, the key spans that they touch, and which of those keys each row sees."""

    batch: int
    rows: slice
    spans: tuple[slice, slice]
    visible: torch.Tensor | None  # [rows, keys], None where every row sees every key


def _edges(cu_seqlens: torch.Tensor | None, batch: int, length: int) -> list[tuple[int, int, int]]:
    if cu_seqlens is None:
        return [(b, 0, length) for b in range(batch)]
    bounds = cu_seqlens.tolist()
    return [(0, lo, hi) for lo, hi in pairwise(bounds)]


def _blocks(problem: SinkWindowProblem) -> Iterator[_Block]:
    q, k, spec = problem.q, problem.k, problem.spec
    sequences = zip(
        _edges(problem.cu_seqlens_q, q.shape[0], q.shape[1]),
        _edges(problem.cu_seqlens_k, k.shape[0], k.shape[1]),
        strict=True,
    )
    for (b, q_lo, q_hi), (_, k_lo, k_hi) in sequences:
        num_q, num_k = q_hi - q_lo, k_hi - k_lo
        offset = num_k - num_q
        most_keys = num_k
        if spec.causal and spec.window_size is not None:
            most_keys = min(num_k, spec.num_sink + spec.window_size)
        step = min(max(_BLOCK_SCORES // max(most_keys * q.shape[2], 1), 16), 512)
        for first in range(0, num_q, step):
            last = min(first + step, num_q)
            spans = spec.key_spans(first, last, offset, num_k)
            visible = None
            if spec.causal:
                key = torch.cat([torch.arange(lo, hi, device=q.device) for lo, hi in spans])[None]
                query = torch.arange(first, last, device=q.device)[:, None] + offset
                visible = key <= query
                if spec.window_size is not None:
                    in_window = key > query - spec.window_size
                    visible &= in_window | (key < spec.num_sink)
            yield _Block(
                b,
                slice(q_lo + first, q_lo + last),
                (
                    slice(k_lo + spans[0][0], k_lo + spans[0][1]),
                    slice(k_lo + spans[1][0], k_lo + spans[1][1]),
                ),
                visible,
            )


def _queries(x: torch.Tensor, block: _Block, num_kv_heads: int) -> torch.Tensor:
    """Rows of a ``[B, N, Hq, D]`` tensor as ``[Hkv, G * rows, D]`` in the compute dtype."""
    rows = x[block.batch, block.rows].to(compute_dtype(x.dtype))
    num_rows, num_heads, dim = rows.shape
    grouped = rows.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    return grouped.permute(1, 2, 0, 3).flatten(1, 2)


def _keys(x: torch.Tensor, block: _Block) -> torch.Tensor:
    """The block's keys of a ``[B, M, Hkv, D]`` tensor as ``[Hkv, keys, D]``."""
    sink, window = block.spans
    rows = torch.cat([x[block.batch, sink], x[block.batch, window]])
    return rows.to(compute_dtype(x.dtype)).transpose(0, 1)


def _ungroup(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Inverse of :func:`_queries`: ``[Hkv, G * rows, D]`` to ``[rows, Hq, D]``."""
    num_kv_heads, grouped_rows, dim = x.shape
    by_head = x.view(num_kv_heads, grouped_rows // num_rows, num_rows, dim)
    return by_head.permute(2, 0, 1, 3).flatten(1, 2)


def _scores(q: torch.Tensor, k: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(1, 2)).mul_(scale)  # [Hkv, G * rows, keys]
    if block.visible is not None:
        num_kv_heads, grouped_rows, num_keys = scores.shape
        num_rows = block.visible.shape[0]
        by_head = scores.view(num_kv_heads, grouped_rows // num_rows, num_rows, num_keys)
        by_head.masked_fill_(~block.visible, float("-inf"))
    return scores


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Gradient ``[Hq]`` of learned sinks from ``lse`` and ``delta`` ``[B, Hq, N]``."""
    # A row without keys, of a head whose sink is -inf too, has an empty softmax.
    mass = (sinks.to(lse.dtype)[None, :, None] - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    return -(mass * delta).sum(dim=(0, 2)).to(sinks.dtype)


@without_autocast
def forward(problem: SinkWindowProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``."""
    q, k, v, sinks = problem.q, problem.k, problem.v, problem.sinks
    out.zero_()
    lse.fill_(float("-inf"))
    num_kv_heads = k.shape[2]
    compute = compute_dtype(q.dtype)
    for block in _blocks(problem):
        num_rows = block.rows.stop - block.rows.start
        rows_q, keys = _queries(q, block, num_kv_heads), _keys(k, block)
        scores = _scores(rows_q, keys, block, problem.spec.softmax_scale)
        top = scores.new_full((*scores.shape[:2], 1), float("-inf"))
        if scores.shape[2]:
            top = scores.amax(dim=2, keepdim=True)
        extra = None
        if sinks is not None:
            extra = sinks.to(compute).view(num_kv_heads, -1, 1).expand(-1, -1, num_rows)
            extra = extra.reshape(num_kv_heads, -1, 1)
            top = torch.maximum(top, extra)
        top = top.masked_fill(top == float("-inf"), 0.0)
        probs = scores.sub_(top).exp_()
        total = probs.sum(dim=2, keepdim=True)
        if extra is not None:
            total = total + (extra - top).exp()
        weighted = torch.matmul(probs, _keys(v, block)) / total.masked_fill(total == 0, 1.0)
        out[block.batch, block.rows] = _ungroup(weighted, num_rows).to(out.dtype)
        lse[block.batch, :, block.rows] = (top + total.log()).reshape(-1, num_rows).to(lse.dtype)


@without_autocast
def backward(
    problem: SinkWindowProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v and sinks, from the output and log-sum-exp of the forward pass."""
    q, k, v, scale = problem.q, problem.k, problem.v, problem.spec.softmax_scale
    num_kv_heads = k.shape[2]
    compute = compute_dtype(q.dtype)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, dtype=compute, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(v, dtype=compute, memory_format=torch.contiguous_format)
    delta = row_sums(dout, out, dlse)
    for block in _blocks(problem):
        num_rows = block.rows.stop - block.rows.start
        rows_q, rows_do = (_queries(x, block, num_kv_heads) for x in (q, dout))
        keys, values = _keys(k, block), _keys(v, block)
        row_lse = lse[block.batch, :, block.rows].reshape(num_kv_heads, -1, 1).to(compute)
        row_delta = delta[block.batch, :, block.rows].reshape(num_kv_heads, -1, 1)
        probs, _ = softmax_(_scores(rows_q, keys, block, scale), row_lse)
        dscores = torch.matmul(rows_do, values.transpose(1, 2)).sub_(row_delta).mul_(probs)
        dscores.mul_(scale)
        dq[block.batch, block.rows] = _ungroup(torch.matmul(dscores, keys), num_rows).to(dq.dtype)
        block_dk = torch.matmul(dscores.transpose(1, 2), rows_q).transpose(0, 1)
        block_dv = torch.matmul(probs.transpose(1, 2), rows_do).transpose(0, 1)
        sink, window = block.spans
        num_sink = sink.stop - sink.start
        for total, part in ((dk, block_dk), (dv, block_dv)):
            total[block.batch, sink] += part[:num_sink]
            total[block.batch, window] += part[num_sink:]
    sinks = problem.sinks
    dsinks = None if sinks is None else sink_gradient(sinks, lse, delta)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks

"""Sink + sliding-window attention in torch operations, for CPU tensors and for fp64.

Queries are handled a block at a time against the keys that the block touches, so memory is
O(block x window), time O(N x window).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from sparsek_kernels.common import torch_attention
from sparsek_kernels.common.operators import new_lse
from sparsek_kernels.common.precision import compute_dtype, row_sums, without_autocast
from sparsek_kernels.common.torch_attention import Part
from sparsek_kernels.sink_window.problem import KeyTerms, SinkWindowProblem
from sparsek_kernels.sink_window.spec import AttentionSpec

_BLOCK_SCORES = 1 << 22  # scores held at once, whatever the shapes


def _edges(cu_seqlens: torch.Tensor | None, batch: int, length: int) -> list[tuple[int, int, int]]:
    if cu_seqlens is None:
        return [(b, 0, length) for b in range(batch)]
    bounds = cu_seqlens.tolist()
    return [(0, lo, hi) for lo, hi in pairwise(bounds)]


def _key_spans(
    spec: AttentionSpec, first: int, last: int, offset: int, num_k: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sinks, then other keys, that rows ``[first, last)`` touch; row ``i`` is at ``i + offset``."""
    if not spec.causal:
        return (0, 0), (0, num_k)
    stop = min(max(last + offset, 0), num_k)
    if spec.window_size is None:
        return (0, 0), (0, stop)
    start = min(max(first + offset - spec.window_size + 1, 0), stop)
    return (0, min(spec.num_sink, start)), (start, stop)


def _parts(problem: SinkWindowProblem) -> Iterator[Part]:
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
            sink, window = _key_spans(spec, first, last, offset, num_k)
            key = torch.cat([torch.arange(*span, device=q.device) for span in (sink, window)])
            hidden = None
            if spec.causal:
                query = torch.arange(first, last, device=q.device)[:, None] + offset
                hidden = key > query
                if spec.window_size is not None:
                    hidden |= (key <= query - spec.window_size) & (key >= spec.num_sink)
            alone = slice(k_lo + window[0], k_lo + window[1])
            keys = alone if sink[0] == sink[1] else key + k_lo
            yield Part(slice(b, b + 1), slice(q_lo + first, q_lo + last), keys, hidden)


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Gradient ``[Hq]`` of learned sinks from ``lse`` and ``delta`` ``[B, Hq, N]``."""
    # A row without keys, of a head whose sink is -inf too, has an empty softmax.
    mass = (sinks.to(lse.dtype)[None, :, None] - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    return -(mass * delta).sum(dim=(0, 2)).to(sinks.dtype)


@without_autocast
def forward(problem: SinkWindowProblem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fill ``out [B, N, Hq, D]`` and, where given, ``lse [B, Hq, N]``."""
    lse = new_lse(problem.q) if lse is None else lse
    inputs, scale = (problem.q, problem.k, problem.v), problem.spec.softmax_scale
    torch_attention.forward(*inputs, _parts(problem), scale, out, lse, problem.sinks)


@without_autocast
def backward(
    problem: SinkWindowProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    terms: KeyTerms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v and sinks, from the output and log-sum-exp of the forward pass.

    ``terms`` are filled.
    """
    q, k, v, dtype = problem.q, problem.k, problem.v, problem.q.dtype
    delta, sinks = row_sums(dout, out, dlse), problem.sinks
    if terms is not None:
        q, k, v = (x.to(compute_dtype(dtype)) for x in (q, k, v))
    scale = problem.spec.softmax_scale
    dq, dk, dv = torch_attention.backward(q, k, v, _parts(problem), scale, dout, (lse, delta))
    if terms is not None:
        terms.fill(dk, dv)
        dq, dk, dv = (x.to(dtype) for x in (dq, dk, dv))
    return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, delta)

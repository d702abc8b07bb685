"""Block-sparse attention in torch operations, for CPU tensors and for fp64.

One row of blocks at a time against the keys that it lists, so that work is proportional to the
listed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from itertools import pairwise

import torch

from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common import torch_attention
from sparsek_kernels.common.dropout import kept_weights
from sparsek_kernels.common.precision import row_sums, without_autocast
from sparsek_kernels.common.torch_attention import Part


def _parts(problem: BlockSparseProblem) -> Iterator[Part]:
    """Rows of blocks that list some keys."""
    q, block_size, causal, shape = problem.q, problem.block_size, problem.causal, problem.shape
    num_q, num_k = q.shape[1], shape.num_k
    within = torch.arange(block_size, device=q.device)
    run = math.gcd(shape.pattern_heads, shape.group)
    for pattern, offsets in enumerate(problem.crow_indices.tolist()):
        heads = slice(pattern * shape.pattern_heads, (pattern + 1) * shape.pattern_heads)
        kv_heads = torch.arange(heads.start, heads.stop, run, device=q.device) // shape.group
        for row, (begin, end) in enumerate(pairwise(offsets)):
            tokens = slice(row * block_size, min((row + 1) * block_size, num_q))
            keys = (problem.col_indices[begin:end, None].long() * block_size + within).flatten()
            keys = keys[keys < (min(tokens.stop + num_k - num_q, num_k) if causal else num_k)]
            if not keys.shape[0]:
                continue
            query = torch.arange(tokens.start, tokens.stop, device=q.device)
            hidden, kept = _hidden(problem, query, keys), _kept(problem, heads, query, keys)
            yield Part(slice(None), tokens, keys, hidden, heads, kv_heads, kept, problem.keep_scale)


def _hidden(
    problem: BlockSparseProblem, query: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Which of the ``keys`` each ``query`` does not see."""
    parts = []
    if problem.causal:
        parts.append(keys > query[:, None] + problem.k.shape[1] - problem.q.shape[1])
    if problem.key_mask is not None:
        parts.append(~problem.key_mask[:, None, None, keys])
    if problem.query_mask is not None:
        parts.append(~problem.query_mask[:, None, query, None])
    return reduce(torch.logical_or, parts) if parts else None


def _kept(
    problem: BlockSparseProblem, heads: slice, query: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Which weights dropout leaves."""
    if problem.rng_state is None:
        return None
    batch, _, num_heads, _ = problem.q.shape
    planes = torch.arange(batch * num_heads, device=query.device).view(batch, num_heads)
    return kept_weights(problem.rng_state, problem.drop_below, planes[:, heads], query, keys)


def _unpadded(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """``x [B, T, H, D]`` with zeros for padding, which may hold anything."""
    return x if mask is None else x.masked_fill(~mask[:, :, None, None], 0.0)


@without_autocast
def forward(problem: BlockSparseProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``."""
    q = _unpadded(problem.q, problem.query_mask)
    k, v = (_unpadded(x, problem.key_mask) for x in (problem.k, problem.v))
    torch_attention.forward(q, k, v, _parts(problem), problem.softmax_scale, out, lse)


@without_autocast
def backward(
    problem: BlockSparseProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, from the output and log-sum-exp of the forward pass."""
    q, dout = (_unpadded(x, problem.query_mask) for x in (problem.q, dout))
    k, v = (_unpadded(x, problem.key_mask) for x in (problem.k, problem.v))
    delta = row_sums(dout, out, dlse)
    if problem.query_mask is not None:
        delta = delta.masked_fill(~problem.query_mask[:, None], 0.0)
    parts, scale = _parts(problem), problem.softmax_scale
    return torch_attention.backward(q, k, v, parts, scale, dout, (lse, delta))

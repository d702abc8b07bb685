"""Block-sparse attention in torch operations, for CPU tensors and for fp64.

One row of blocks at a time against the keys that it lists, so that work is proportional to the
listed blocks; the gradient is written out rather than recorded.  Half-precision inputs are
computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch

from sparsek_kernels.block_sparse.problem import BlockSparseProblem
from sparsek_kernels.common.dropout import kept_weights
from sparsek_kernels.common.precision import compute_dtype, row_sums, softmax_, without_autocast


@dataclass(frozen=True)
class _BlockRow:
    """One row of blocks: the query heads and tokens that own it, and the keys it lists."""

    heads: slice
    tokens: slice
    kv_heads: torch.Tensor  # [heads]
    keys: torch.Tensor  # [keys]
    hidden: torch.Tensor | None  # broadcasts to [B, heads, tokens, keys]; None: every key is seen
    kept: torch.Tensor | None  # [B, heads, tokens, keys], None without dropout


def _block_rows(problem: BlockSparseProblem) -> Iterator[_BlockRow]:
    q, block_size, causal, shape = problem.q, problem.block_size, problem.causal, problem.shape
    num_q, num_k = q.shape[1], shape.num_k
    within = torch.arange(block_size, device=q.device)
    for pattern, offsets in enumerate(problem.crow_indices.tolist()):
        heads = slice(pattern * shape.pattern_heads, (pattern + 1) * shape.pattern_heads)
        kv_heads = torch.arange(heads.start, heads.stop, device=q.device) // shape.group
        for row, (begin, end) in enumerate(pairwise(offsets)):
            tokens = slice(row * block_size, min((row + 1) * block_size, num_q))
            keys = (problem.col_indices[begin:end, None].long() * block_size + within).flatten()
            keys = keys[keys < (min(tokens.stop + num_k - num_q, num_k) if causal else num_k)]
            if not keys.shape[0]:
                continue
            query = torch.arange(tokens.start, tokens.stop, device=q.device)
            hidden, kept = _hidden(problem, query, keys), _kept(problem, heads, query, keys)
            yield _BlockRow(heads, tokens, kv_heads, keys, hidden, kept)


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


def _queries(x: torch.Tensor, row: _BlockRow) -> torch.Tensor:
    """The row's part of a ``[B, N, Hq, D]`` tensor as ``[B, heads, tokens, D]``."""
    return x[:, row.tokens, row.heads].to(compute_dtype(x.dtype)).transpose(1, 2)


def _keys(x: torch.Tensor, row: _BlockRow) -> torch.Tensor:
    """The row's part of a ``[B, M, Hkv, D]`` tensor as ``[B, heads, keys, D]``."""
    listed = x[:, row.keys].to(compute_dtype(x.dtype)).transpose(1, 2)
    return listed[:, row.kv_heads]


def _scores(q: torch.Tensor, k: torch.Tensor, row: _BlockRow, scale: float) -> torch.Tensor:
    scores = torch.matmul(q, k.mT).mul_(scale)  # [B, heads, tokens, keys]
    return scores if row.hidden is None else scores.masked_fill_(row.hidden, float("-inf"))


def _dropped(x: torch.Tensor, row: _BlockRow, scale: float) -> torch.Tensor:
    """``x [B, heads, tokens, keys]`` with zeros for dropped weights, the others times ``scale``."""
    return x if row.kept is None else x.mul(scale).masked_fill_(~row.kept, 0.0)


def _unpadded(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """``x [B, T, H, D]`` with zeros for padding, which may hold anything."""
    return x if mask is None else x.masked_fill(~mask[:, :, None, None], 0.0)


@without_autocast
def forward(problem: BlockSparseProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``."""
    q = _unpadded(problem.q, problem.query_mask)
    k, v = (_unpadded(x, problem.key_mask) for x in (problem.k, problem.v))
    out.zero_()
    lse.fill_(float("-inf"))
    for row in _block_rows(problem):
        scores = _scores(_queries(q, row), _keys(k, row), row, problem.softmax_scale)
        probs, row_lse = softmax_(scores)
        probs = _dropped(probs, row, problem.keep_scale)
        attended = torch.matmul(probs, _keys(v, row)).transpose(1, 2)
        out[:, row.tokens, row.heads] = attended.to(out.dtype)
        lse[:, row.heads, row.tokens] = row_lse[..., 0].to(lse.dtype)


@without_autocast
def backward(
    problem: BlockSparseProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, from the output and log-sum-exp of the forward pass."""
    scale, keep_scale = problem.softmax_scale, problem.keep_scale
    q, dout = (_unpadded(x, problem.query_mask) for x in (problem.q, dout))
    k, v = (_unpadded(x, problem.key_mask) for x in (problem.k, problem.v))
    compute = compute_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=compute, device=x.device) for x in (k, v))
    delta = row_sums(dout, out, dlse)
    if problem.query_mask is not None:
        delta = delta.masked_fill(~problem.query_mask[:, None], 0.0)
    for row in _block_rows(problem):
        row_q, row_dout, keys, values = (
            _queries(q, row), _queries(dout, row), _keys(k, row), _keys(v, row)
        )  # fmt: skip
        row_lse, row_delta = (x[:, row.heads, row.tokens, None] for x in (lse, delta))
        probs, _ = softmax_(_scores(row_q, keys, row, scale), row_lse)
        dprobs = _dropped(torch.matmul(row_dout, values.mT), row, keep_scale)
        dscores = dprobs.sub_(row_delta).mul_(probs)
        dscores.mul_(scale)
        dq[:, row.tokens, row.heads] = torch.matmul(dscores, keys).transpose(1, 2).to(dq.dtype)
        probs = _dropped(probs, row, keep_scale)
        for total, weights, rows in ((dk, dscores, row_q), (dv, probs, row_dout)):
            part = torch.matmul(weights.mT, rows)  # [B, heads, keys, D]
            shared = part.new_zeros(part.shape[0], k.shape[2], *part.shape[2:])
            shared.index_add_(1, row.kv_heads, part)
            total[:, row.keys] += shared.transpose(1, 2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)

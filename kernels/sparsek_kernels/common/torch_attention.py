"""Attention in torch operations, for CPU tensors and for fp64: some queries at a time.

A family says which keys each of its parts touches, so that memory and work grow with these; what
is computed of them is here.  Gradients are written out rather than recorded.  Half-precision
inputs are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from sparsek_kernels.common.precision import compute_dtype, softmax_


@dataclass(frozen=True)
class Part:
    """Queries, and the keys that they touch.

    Args:
        batch, rows: the queries, of ``[B, N, Hq, D]``.
        keys: distinct keys of ``[B, M, Hkv, D]``.
        hidden: bool, broadcasts to ``[batch, heads, rows, keys]``; ``None``: every key is seen.
        heads: the query heads.
        kv_heads: ``[n]`` KV heads of ``n`` runs of equally many of them; ``None``: all KV heads.
        kept: ``[batch, heads, rows, keys]`` bool, the weights that dropout leaves, each multiplied
            by ``keep_scale``; ``None`` without dropout.
        bias: added to the scores, as ``hidden`` is shaped.
    """

    batch: slice
    rows: slice
    keys: slice | torch.Tensor
    hidden: torch.Tensor | None = None
    heads: slice = field(default_factory=lambda: slice(None))
    kv_heads: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    keep_scale: float = 1.0
    bias: torch.Tensor | None = None

    def queries(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """``[b, KV heads, group * rows, D]`` of ``x [B, N, Hq, D]``."""
        runs = k.shape[2] if self.kv_heads is None else len(self.kv_heads)
        rows = x[self.batch, self.rows, self.heads].to(compute_dtype(x.dtype))
        return torch.unflatten(rows, 2, (runs, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def key_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, KV heads, keys, D]`` of ``x [B, M, Hkv, D]``."""
        rows = x[self.batch, self.keys].to(compute_dtype(x.dtype)).transpose(1, 2)
        return rows if self.kv_heads is None else rows[:, self.kv_heads]

    def scores(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """``[b, KV heads, group * rows, keys]``, ``-inf`` where a key is hidden."""
        scores = torch.matmul(q, k.mT).mul_(scale)
        if self.bias is not None:
            self.by_head(scores).add_(self.bias)
        if self.hidden is not None:
            self.by_head(scores).masked_fill_(self.hidden, float("-inf"))
        return scores

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, heads, rows, -1]``, a view of ``x [b, KV heads, group * rows, -1]``."""
        count = self.rows.stop - self.rows.start
        return x.view(x.shape[0], x.shape[1] * x.shape[2] // count, count, x.shape[3])

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        """``x [b, KV heads, group * rows, keys]`` with zeros for dropped weights."""
        if self.kept is None:
            return x
        return x.mul(self.keep_scale).masked_fill_(~self.kept.view_as(x), 0.0)

    def put(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Write ``x [b, KV heads, group * rows, D]`` into ``total [B, N, Hq, D]``."""
        total[self.batch, self.rows, self.heads] = self.by_head(x).transpose(1, 2).to(total.dtype)

    def add(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``x [b, KV heads, keys, D]`` to ``total [B, M, Hkv, D]``."""
        if self.kv_heads is not None:
            shared = x.new_zeros(x.shape[0], total.shape[2], *x.shape[2:])
            x = shared.index_add_(1, self.kv_heads, x)
        total[self.batch, self.keys] += x.transpose(1, 2)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: Iterable[Part],
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Fill ``out [B, N, Hq, D]`` and ``lse [B, Hq, N]``: 0 and ``-inf`` where no key is seen.

    Args:
        sinks: ``[Hq]`` learned logits that join the denominator.
    """
    out.zero_()
    lse.fill_(float("-inf"))
    for part in parts:
        scores = part.scores(part.queries(q, k), part.key_rows(k), scale)
        top = scores.new_full((*scores.shape[:3], 1), float("-inf"))
        if scores.shape[3]:
            top = scores.amax(dim=3, keepdim=True)
        extra = None
        if sinks is not None:
            logits = sinks[part.heads, None, None].to(top.dtype)
            extra = logits.expand_as(part.by_head(top)).reshape(top.shape)
            top = torch.maximum(top, extra)
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=3, keepdim=True)
        if extra is not None:
            total = total + (extra - top).exp()
        weighted = torch.matmul(part.dropped(weights), part.key_rows(v))
        part.put(out, weighted / total.masked_fill(total == 0, 1.0))
        found = part.by_head(top + total.log())[..., 0]
        lse[part.batch, part.heads, part.rows] = found.to(lse.dtype)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: Iterable[Part],
    scale: float,
    dout: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor] | None,
    dbias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v.

    Args:
        sums: log-sum-exp of :func:`forward` and :func:`row_sums`, ``[B, Hq, N]``; ``None``: both
            are worked out anew.
        dbias: ``[B, Hq, N, M]``, where the gradients of biases are written.
    """
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    compute = compute_dtype(q.dtype)
    dk, dv = (torch.zeros(x.shape, dtype=compute, device=x.device) for x in (k, v))
    of_rows = [x.transpose(1, 2)[..., None] for x in sums or ()]
    for part in parts:
        rows, upstream, *known = (part.queries(x, k) for x in (q, dout, *of_rows))
        keys, values = part.key_rows(k), part.key_rows(v)
        probs, _ = softmax_(part.scores(rows, keys, scale), known[0] if known else None)
        dprobs = part.dropped(torch.matmul(upstream, values.mT))
        delta = known[1] if known else (probs * dprobs).sum(dim=3, keepdim=True)
        dscores = dprobs.sub_(delta).mul_(probs)
        if dbias is not None:
            dbias[part.batch, part.heads, part.rows] = part.by_head(dscores).to(dbias.dtype)
        dscores.mul_(scale)
        part.put(dq, torch.matmul(dscores, keys))
        part.add(dk, torch.matmul(dscores.mT, rows))
        part.add(dv, torch.matmul(part.dropped(probs).mT, upstream))
    return dq, dk.to(k.dtype), dv.to(v.dtype)

"""An attention oracle for long sequences: exact, chunked over queries, one KV head at a time.

It exists beside the kernels' own oracles because it must run at 128k tokens, where an N x N matrix
does not fit: each chunk of queries gathers only the keys that its mask lets it see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sparsek_backend.bench.registry import GateResult

_SLACK = 1e-4  # of an error, absolute


class Mask(Protocol):
    """Which keys queries see, for all KV heads."""

    def __hash__(self) -> int: ...

    def of_head(self, kv_head: int) -> Mask:
        """The mask of one KV head."""

    def visible(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        """[len(rows), len(cols)] bool of one head; rows are query positions counted in keys."""

    def count_pairs(self, num_queries: int, num_keys: int) -> float:
        """Visible (query, key) pairs of a head, on average: what the FLOPs are counted from."""


@dataclass(frozen=True)
class MaskRule:
    """Which keys a query sees: all up to itself, or sinks and a window (bottom-right aligned).

    Args:
        num_sink: first keys that every later query sees; only with a window.
        window_size: latest keys, the query's own included, or None for all.
        causal: False for full attention; needs `window_size=None`.
    """

    num_sink: int = 0
    window_size: int | None = None
    causal: bool = True

    def of_head(self, kv_head: int) -> MaskRule:
        """Every head has the same mask."""
        return self

    def visible(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        """[len(rows), len(cols)] bool; rows are query positions counted in keys."""
        if not self.causal:
            return torch.ones(len(rows), len(cols), dtype=torch.bool, device=rows.device)
        seen = cols[None, :] <= rows[:, None]
        if self.window_size is not None:
            near = cols[None, :] > rows[:, None] - self.window_size
            seen &= near | (cols[None, :] < self.num_sink)
        return seen

    def count_pairs(self, num_queries: int, num_keys: int) -> int:
        """Visible (query, key) pairs of one head: what the FLOPs are counted from."""
        if not self.causal:
            return num_queries * num_keys
        rows = torch.arange(num_queries, dtype=torch.int64) + (num_keys - num_queries)
        seen = rows + 1
        if self.window_size is not None:
            near = torch.clamp(seen, max=self.window_size)
            seen = near + torch.clamp(seen - near, max=self.num_sink)
        return int(torch.clamp(seen, min=0).sum())


@dataclass(frozen=True)
class HeadGrads:
    """Outputs of one KV head's group: out [N, G, D]; grads None when no `dout` was given."""

    out: torch.Tensor
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsinks: torch.Tensor | None


def attend_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Mask,
    *,
    dtype: torch.dtype,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    dout: torch.Tensor | None = None,
    chunk: int = 1024,
) -> HeadGrads:
    """Attention of one KV head in `dtype`, every intermediate rounded to it.

    Args:
        q: [N, G, D], the query heads that share the KV head.
        k: [M, D].
        v: [M, D].
        rule: the mask.
        dtype: torch.float64 for the oracle, the inputs' own for "what plain torch would give".
        softmax_scale: factor on q . k.
        sinks: [G] extra logits in the denominator.
        dout: [N, G, D]; gradients are computed when it is given.
        chunk: queries at a time.
    """
    num_queries, group, dim = q.shape
    num_keys = k.shape[0]
    out = torch.zeros(num_queries, group, dim, dtype=dtype, device=q.device)
    key, value = k.to(dtype), v.to(dtype)
    grads: list[torch.Tensor] = []
    dsinks = None
    if dout is not None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        grads = [torch.zeros_like(out)]
        grads += [torch.zeros(num_keys, dim, dtype=wide, device=q.device) for _ in range(2)]
        dsinks = None if sinks is None else torch.zeros(group, dtype=wide, device=q.device)
    for start in range(0, num_queries, chunk):
        rows = torch.arange(start, min(start + chunk, num_queries), device=q.device)
        at = rows + (num_keys - num_queries)
        seen = rule.visible(at, torch.arange(num_keys, device=q.device))
        cols = seen.any(0).nonzero()[:, 0]
        if not len(cols):
            continue
        hidden = ~seen[:, cols]
        qs = q[rows].to(dtype).transpose(0, 1)  # [G, R, D]
        ks, vs = key[cols], value[cols]  # [C, D]
        logits = (qs @ ks.T) * softmax_scale
        logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.to(dtype)[:, None, None].expand(group, len(rows), 1)
            logits = torch.cat([logits, extra], dim=-1)
        probs = torch.softmax(logits, dim=-1).nan_to_num(0.0)
        sink_probs = probs[..., len(cols) :]
        probs = probs[..., : len(cols)]
        partial = probs @ vs
        out[rows] = partial.transpose(0, 1)
        if dout is None:
            continue
        do = dout[rows].to(dtype).transpose(0, 1)
        delta = (do * partial).sum(-1, keepdim=True)
        ds = probs * (do @ vs.T - delta)
        grads[0][rows] = ((ds @ ks) * softmax_scale).transpose(0, 1)
        dk = (ds.transpose(1, 2) @ qs).sum(0) * softmax_scale
        grads[1].index_add_(0, cols, dk.to(grads[1].dtype))
        grads[2].index_add_(0, cols, (probs.transpose(1, 2) @ do).sum(0).to(grads[2].dtype))
        if dsinks is not None:
            dsinks -= (sink_probs * delta).sum((1, 2)).to(dsinks.dtype)
    if dout is None:
        return HeadGrads(out, None, None, None, None)
    return HeadGrads(out, grads[0], grads[1].to(dtype), grads[2].to(dtype), dsinks)


def compare(
    names: Sequence[str],
    got: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
) -> GateResult:
    """The two-times-torch-error rule, on the largest and on the RMS error of each tensor.

    ``_SLACK`` is for tensors that plain torch gets exactly right.

    Args:
        names: names of the tensors.
        got: what the provider computed.
        exact: fp64 oracle.
        plain: plain torch in the inputs' dtype.
    """
    worst = ""
    worst_ratio = -1.0
    for name, value, oracle, reference in zip(names, got, exact, plain, strict=True):
        if value.shape != oracle.shape:
            return GateResult(False, f"{name}: shape {tuple(value.shape)} is not {oracle.shape}")
        if not bool(torch.isfinite(value).all()):
            return GateResult(False, f"{name}: not finite")
        error = (value.double() - oracle).abs()
        bound = (reference.double() - oracle).abs()
        checks = (
            ("max", float(error.max()), 2 * float(bound.max()) + _SLACK),
            ("rms", _rms(error), 2 * _rms(bound) + _SLACK),
        )
        for kind, err, limit in checks:
            ratio = err / limit
            if ratio > worst_ratio:
                worst_ratio = ratio
                worst = f"{name} {kind} error {err:.2e}, bound {limit:.2e}"
    return GateResult(worst_ratio <= 1.0, worst)


def _rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())

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
    """Which keys a query sees: all up to itself, or sinks and a window (bottom-right aligned)."""

    num_sink: int = 0  # first keys that every later query sees; only with a window
    window_size: int | None = None  # latest keys, the query's own included, or None for all
    causal: bool = True  # False for full attention; needs `window_size=None`

    def of_head(self, kv_head: int) -> MaskRule:
        return self

    def visible(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        if not self.causal:
            return torch.ones(len(rows), len(cols), dtype=torch.bool, device=rows.device)
        seen = cols[None, :] <= rows[:, None]
        if self.window_size is not None:
            near = cols[None, :] > rows[:, None] - self.window_size
            seen &= near | (cols[None, :] < self.num_sink)
        return seen

    def count_pairs(self, num_queries: int, num_keys: int) -> int:
        if not self.causal:
            return num_queries * num_keys
        rows = torch.arange(num_queries, dtype=torch.int64) + (num_keys - num_queries)
        seen = rows + 1
        if self.window_size is not None:
            near = torch.clamp(seen, max=self.window_size)
            seen = near + torch.clamp(seen - near, max=self.num_sink)
        return int(torch.clamp(seen, min=0).sum())


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
    logs: torch.Tensor | None = None,
    chunk: int = 1024,
) -> list[torch.Tensor]:
    """Attention of one KV head in `dtype`, every intermediate rounded to it: `out [N, G, D]`.

    With `dout` the gradients of `q`, `k`, `v` and of given `sinks` follow, by autograd, summed over
    chunks in at least fp32.

    Args:
        q: [N, G, D], the query heads that share the KV head.
        k: [M, D].
        v: [M, D].
        dtype: torch.float64 for the oracle, the inputs' own for "what plain torch would give".
        sinks: [G] extra logits in the denominator.
        logs: [M], natural logs of the weights of keys; by default 0.
    """
    num_queries, num_keys = len(q), len(k)
    tensors = [x.detach().to(dtype) for x in (q, k, v, *([] if sinks is None else [sinks]))]
    wide = torch.promote_types(dtype, torch.float32)
    out, *grads = (torch.zeros_like(x, dtype=wide) for x in (tensors[0], *tensors))
    for start in range(0, num_queries, chunk):
        rows = torch.arange(start, min(start + chunk, num_queries), device=q.device)
        at = rows + (num_keys - num_queries)
        seen = rule.visible(at, torch.arange(num_keys, device=q.device))
        cols = seen.any(0).nonzero()[:, 0]
        if not len(cols):
            continue
        places = (rows, cols, cols, slice(None))[: len(tensors)]
        parts = [x[place].requires_grad_() for x, place in zip(tensors, places, strict=True)]
        with torch.set_grad_enabled(dout is not None):
            more = None if logs is None else logs[cols].to(dtype)
            hidden = ~seen[:, cols]
            partial = _attend(*parts, hidden=hidden, softmax_scale=softmax_scale, logs=more)
        out[rows] = partial.detach().to(wide)
        if dout is None:
            continue
        found = torch.autograd.grad(partial, parts, dout[rows].to(dtype))
        for grad, place, part in zip(grads, places, found, strict=True):
            grad[place] += part
    return [x.to(dtype) for x in ((out,) if dout is None else (out, *grads))]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    hidden: torch.Tensor,
    softmax_scale: float,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, G, D] of queries ``[R, G, D]`` over keys ``[C, D]``, of which some are hidden."""
    logits = (q.transpose(0, 1) @ k.T) * softmax_scale  # [G, R, C]
    if logs is not None:
        logits = logits + logs
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    probs = torch.softmax(logits, dim=-1)[..., : len(k)].masked_fill(hidden, 0.0)
    return (probs @ v).transpose(0, 1)


def compare(
    names: Sequence[str],
    got: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
) -> GateResult:
    """The two-times-torch-error rule, on the largest and on the RMS error of each tensor.

    ``_SLACK`` is for tensors that plain torch gets exactly right.

    Args:
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

"""Oracle of sink + sliding-window attention: plain torch, fp32 or fp64, one mask matrix.

Written to be read: scores, a mask, a softmax with one extra logit, a weighted sum.  One KV head
at a time, so that a few thousand tokens fit into memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def sink_window_mask(
    num_q: int,
    num_k: int,
    *,
    num_sink: int = 0,
    window_size: int | None = None,
    causal: bool = True,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which key each query sees: ``[num_q, num_k]`` bool, queries aligned to the last keys."""
    if not causal:
        return torch.ones(num_q, num_k, dtype=torch.bool, device=device)
    query = torch.arange(num_q, device=device)[:, None] + (num_k - num_q)
    key = torch.arange(num_k, device=device)[None, :]
    visible = key <= query
    if window_size is not None:
        visible = visible & ((key < num_sink) | (key > query - window_size))
    return visible


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One KV head: q ``[G, N, D]``, k and v ``[M, D]``, sinks ``[G]`` -> out, lse ``[G, N]``."""
    scores = (q @ k.T) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks[:, None, None].expand(-1, q.shape[1], 1)
        lse = torch.logsumexp(torch.cat([scores, extra], dim=-1), dim=-1)
    elif k.shape[0] == 0:
        lse = scores.new_full(scores.shape[:-1], float("-inf"))
    else:
        lse = torch.logsumexp(scores, dim=-1)
    dead = lse == float("-inf")
    probs = torch.exp(scores - lse.masked_fill(dead, 0.0)[..., None])
    return probs.masked_fill(dead[..., None], 0.0) @ v, lse


def _bounds(cu_seqlens: torch.Tensor | None, batch: int, length: int) -> list[tuple[int, slice]]:
    """(batch index, token slice) of each sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, length)) for b in range(batch)]
    edges = cu_seqlens.tolist()
    return [(0, slice(lo, hi)) for lo, hi in pairwise(edges)]


def sink_flash_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    num_sink: int = 0,
    window_size: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention, and with ``dout`` its gradients, computed in ``dtype``.

    Args:
        q: ``[B, N, Hq, D]``.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        num_sink: leading keys of a sequence that every query sees.
        window_size: latest keys that a query sees, its own included; ``None`` is all.
        causal: ``False`` lets every query see every key.
        sinks: ``[Hq]`` extra logits of the softmax denominator.
        cu_seqlens_q: ``[S + 1]`` offsets of packed sequences (B = 1).
        cu_seqlens_k: ``[S + 1]`` offsets of their keys.
        dtype: precision of every operation.
        dout: ``[B, N, Hq, D]`` upstream gradient of the output.
        dlse: ``[B, Hq, N]`` upstream gradient of the log-sum-exp.

    Returns:
        ``(out [B, N, Hq, D], lse [B, Hq, N])``, followed, when ``dout`` is given, by ``dq``,
        ``dk``, ``dv`` and (with ``sinks``) ``dsinks``, all in ``dtype``.
    """
    batch, num_q, num_heads, dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    scale = dim**-0.5
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full((batch, num_heads, num_q), float("-inf"), dtype=dtype)
    grads = [torch.zeros_like(t, dtype=dtype) for t in (q, k, v)]
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    sequences = zip(
        _bounds(cu_seqlens_q, batch, num_q), _bounds(cu_seqlens_k, batch, k.shape[1]), strict=True
    )
    for (b, rows), (_, cols) in sequences:
        mask = sink_window_mask(
            rows.stop - rows.start,
            cols.stop - cols.start,
            num_sink=num_sink,
            window_size=window_size,
            causal=causal,
            device=q.device,
        )
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            leaves = [
                q[b, rows, heads].to(dtype).transpose(0, 1),
                k[b, cols, head].to(dtype),
                v[b, cols, head].to(dtype),
            ]
            if sinks is not None:
                leaves.append(sinks[heads].to(dtype))
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_(dout is not None) for leaf in leaves]
                extra = None if sinks is None else leaves[3]
                head_out, head_lse = _attend(leaves[0], leaves[1], leaves[2], mask, extra, scale)
            out[b, rows, heads] = head_out.detach().transpose(0, 1)
            lse[b, heads, rows] = head_lse.detach()
            if dout is None or (sinks is None and cols.start == cols.stop):
                continue
            outputs, upstream = [head_out], [dout[b, rows, heads].to(dtype).transpose(0, 1)]
            if dlse is not None:
                outputs.append(head_lse)
                upstream.append(dlse[b, heads, rows].to(dtype))
            found = torch.autograd.grad(outputs, leaves, upstream)
            grads[0][b, rows, heads] = found[0].transpose(0, 1)
            grads[1][b, cols, head] = found[1]
            grads[2][b, cols, head] = found[2]
            if dsinks is not None:
                dsinks[heads] += found[3]
    if dout is None:
        return out, lse
    return (out, lse, *grads) if dsinks is None else (out, lse, *grads, dsinks)

"""Attention with an additive tensor or dropout: plain torch, in time and memory O(N x M).

No SparseK kernel takes an arbitrary bias or dropout; these operators serve such calls exactly,
with the log-sum-exp and every gradient, and each reason is logged once and counted
(:func:`sparsek_kernels.fallback.fallback_counts`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek_kernels.common import torch_attention
from sparsek_kernels.common.precision import without_autocast
from sparsek_kernels.common.torch_attention import Part

_CHUNK_SCORES = 1 << 24  # scores held at once
# cuDNN's may differ in the last bit from call to call.
_REPRODUCIBLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _chunks(q: torch.Tensor, num_k: int) -> Iterator[tuple[int, int, int]]:
    """(batch index, first row, row past the last) of blocks that fit the memory bound."""
    batch, num_q, num_heads = q.shape[:3]
    step = min(max(_CHUNK_SCORES // max(num_heads * num_k, 1), 1), max(num_q, 1))
    for b in range(batch):
        for first in range(0, num_q, step):
            yield b, first, min(first + step, num_q)


def visible_keys(
    first: int,
    last: int,
    num_k: int,
    shift: int,
    window_size: int | None,
    num_sink: int,
    device: torch.device | str,
) -> torch.Tensor:
    """``[last - first, num_k]`` bool: keys that query rows ``first`` to ``last`` see (causal)."""
    query = torch.arange(first, last, device=device)[:, None] + shift
    key = torch.arange(num_k, device=device)[None]
    seen = key <= query
    if window_size is not None:
        seen &= (key > query - window_size) | (key < num_sink)
    return seen


def _parts(
    q: torch.Tensor,
    num_k: int,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
    causal: bool,
    shift: int,
    window_size: int | None,
    num_sink: int,
    p: float,
) -> Iterator[Part]:
    """Blocks of queries with all keys, the same ones and the same dropout at every call."""
    generator = torch.Generator(device=q.device)
    if seed is not None:
        generator.manual_seed((int(seed) + stream) % (1 << 62))
    for b, first, last in _chunks(q, num_k):
        batch, rows = slice(b, b + 1), slice(first, last)
        hidden = kept = None
        if causal:
            seen = visible_keys(first, last, num_k, shift, window_size, num_sink, q.device)
            hidden = ~seen
        if p > 0.0:
            shape = (1, q.shape[2], last - first, num_k)
            kept = torch.rand(shape, generator=generator, device=q.device) >= p
        yield Part(
            batch,
            rows,
            slice(None),
            hidden,
            kept=kept,
            keep_scale=1.0 / (1.0 - p) if p < 1.0 else 0.0,
            bias=None if bias is None else bias[batch, :, rows].float(),
        )


@torch.library.custom_op("sparsek::biased_attention_fwd", mutates_args=())
@without_autocast
def biased_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
    causal: bool,
    shift: int,
    window_size: int | None,
    num_sink: int,
    p: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a bias and dropout.

    Args:
        q: ``[B, N, H, D]``; k: ``[B, M, H, D]``; v: ``[B, M, H, Dv]``.
        bias: ``[B, H, N, M]``, added to the scaled scores.
        seed: int64 scalar on the host, needed when ``p > 0``; ``stream`` tells calls of one
            attention apart.
        causal: query ``i`` sees key ``j <= i + shift``, and with ``window_size`` only
            ``j > i + shift - window_size`` or ``j < num_sink``.
        p: probability that a softmax weight is dropped.
        scale: factor of ``q . k``.

    Returns:
        Output ``[B, N, H, Dv]`` and log-sum-exp ``[B, H, N]`` in fp32.
    """
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    parts = _parts(q, k.shape[1], bias, seed, stream, causal, shift, window_size, num_sink, p)
    torch_attention.forward(q, k, v, parts, scale, out, lse)
    return out, lse


@biased_attention_fwd.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


@torch.library.custom_op("sparsek::biased_attention_bwd", mutates_args=())
@without_autocast
def biased_attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
    causal: bool,
    shift: int,
    window_size: int | None,
    num_sink: int,
    p: float,
    scale: float,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and (empty unless ``bias_grad``) of the bias."""
    dbias = None
    if bias_grad and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    parts = _parts(q, k.shape[1], bias, seed, stream, causal, shift, window_size, num_sink, p)
    # Without the forward's log-sum-exp, which is rounded.
    grads = torch_attention.backward(q, k, v, parts, scale, dout, None, dbias)
    return *grads, q.new_empty(0) if dbias is None else dbias


@biased_attention_bwd.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, bias_grad = rest
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dbias = q.new_empty(0)
    if bias_grad and bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    return dq, dk, dv, dbias


@without_autocast
def sdpa_with_bias(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Output of torch's SDPA under a bias ``[B, H, N, M]`` and a visibility mask ``[N, M]``.

    A query that sees no key gives zeros. There is a key at least.
    """
    # SDPA takes one dtype: in fp16 a bias of -1e9 would be -inf, one of 1e9 NaN.
    dtype = torch.promote_types(q.dtype, bias.dtype)
    mask = bias[: 1 if bias.stride(0) == 0 else None, : 1 if bias.stride(1) == 0 else None].to(
        dtype
    )
    if seen is not None:
        mask = mask.masked_fill(~seen, float("-inf"))
    # On a GPU it multiplies logits by log2(e): rows near the largest number count from their top.
    top = mask.amax(dim=-1, keepdim=True)
    far = top.isfinite() & (top.abs() > torch.finfo(dtype).max / 2)
    mask = mask - top.masked_fill(~far, 0.0)
    rows, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(_REPRODUCIBLE):
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out.masked_fill(top.isneginf(), 0.0).transpose(1, 2).to(q.dtype)

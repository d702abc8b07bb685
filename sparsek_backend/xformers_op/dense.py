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

from sparsek_kernels.common.precision import softmax_, without_autocast

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


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    block: tuple[int, int, int],
    causal: bool,
    shift: int,
    window_size: int | None,
    num_sink: int,
    scale: float,
) -> torch.Tensor:
    """Scores ``[H, rows, M]`` of a block, biased and masked, fp32."""
    b, first, last = block
    rows = q[b, first:last].float().transpose(0, 1)
    scores = torch.matmul(rows, k[b].float().permute(1, 2, 0)) * scale
    if bias is not None:
        scores += bias[b, :, first:last].float()
    if causal:
        seen = visible_keys(first, last, k.shape[1], shift, window_size, num_sink, q.device)
        scores.masked_fill_(~seen, float("-inf"))
    return scores


def _kept(probs: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Factors ``0`` or ``1 / (1 - p)`` for each probability."""
    keep = torch.rand(probs.shape, generator=generator, device=probs.device) >= p
    return keep.float() * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _generator(seed: torch.Tensor | None, stream: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    if seed is not None:
        generator.manual_seed((int(seed) + stream) % (1 << 62))
    return generator


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
    generator = _generator(seed, stream, q.device)
    for block in _chunks(q, k.shape[1]):
        b, first, last = block
        scores = _scores(q, k, bias, block, causal, shift, window_size, num_sink, scale)
        probs, block_lse = softmax_(scores)
        if p > 0.0:
            probs = probs * _kept(probs, p, generator)
        weighted = torch.matmul(probs, v[b].float().transpose(0, 1))
        out[b, first:last] = weighted.transpose(0, 1).to(out.dtype)
        lse[b, :, first:last] = block_lse[..., 0]
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
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    dbias = q.new_empty(0)
    if bias_grad and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    generator = _generator(seed, stream, q.device)
    for block in _chunks(q, k.shape[1]):
        b, first, last = block
        scores = _scores(q, k, bias, block, causal, shift, window_size, num_sink, scale)
        probs, _ = softmax_(scores)  # not of the forward's log-sum-exp, which is rounded
        rows_do = dout[b, first:last].float().transpose(0, 1)
        dprobs = torch.matmul(rows_do, v[b].float().permute(1, 2, 0))
        dropped = probs
        if p > 0.0:
            kept = _kept(probs, p, generator)
            dprobs, dropped = dprobs * kept, probs * kept
        dscores = probs * (dprobs - (probs * dprobs).sum(dim=-1, keepdim=True))
        if dbias.numel():
            dbias[b, :, first:last] = dscores.to(dbias.dtype)
        rows_q = q[b, first:last].float().transpose(0, 1)
        keys = k[b].float().transpose(0, 1)
        dq[b, first:last] = (torch.matmul(dscores, keys) * scale).transpose(0, 1).to(dq.dtype)
        dk[b] += (torch.matmul(dscores.transpose(1, 2), rows_q) * scale).transpose(0, 1)
        dv[b] += torch.matmul(dropped.transpose(1, 2), rows_do).transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias


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

    A query that sees no key gives zeros.
    """
    # SDPA takes one dtype: in fp16 a bias of -1e9 would be -inf, one of 1e9 NaN.
    dtype = torch.promote_types(q.dtype, bias.dtype)
    mask = bias.to(dtype)
    if seen is not None:
        mask = mask.masked_fill(~seen, float("-inf"))
    rows, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(_REPRODUCIBLE):
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    empty = (mask == float("-inf")).all(dim=-1, keepdim=True)
    return out.masked_fill(empty, 0.0).transpose(1, 2).to(q.dtype)

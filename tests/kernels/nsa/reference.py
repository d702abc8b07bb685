"""Oracle of native sparse attention (arXiv 2502.11089): plain torch, one sequence at a time.

Written to be read against the paper's equations, differentiable by autograd, with full matrices.
It shares nothing with the implementations of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch


def phi_reference(
    x: torch.Tensor,
    position: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> torch.Tensor:
    """The learnable map of equation 7: ``[C, l, Hkv, D]`` blocks to ``[C, Hkv, D]``.

    ``position [l, D]`` is added inside the block, the block is flattened token by token, and an
    MLP with one GELU layer (``w1 [l * D, F]``, ``w2 [F, D]``) maps it to one vector.
    """
    blocks = (x + position[:, None]).transpose(1, 2).flatten(2)
    return torch.nn.functional.gelu(blocks @ w1 + b1) @ w2 + b2


def compress_reference(
    x: torch.Tensor,
    cmp_block_size: int,
    cmp_stride: int,
    phi: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Equation 7 for one sequence: ``[M, Hkv, D]`` to ``[C, Hkv, D]``; the mean without ``phi``."""
    blocks = [
        x[lo : lo + cmp_block_size] for lo in range(0, x.shape[0] - cmp_block_size + 1, cmp_stride)
    ]
    if not blocks:
        return x[:0]
    stacked = torch.stack(blocks)
    return stacked.mean(dim=1) if phi is None else phi(stacked)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention of ``q [N, Hq, D]`` over ``k, v [M, Hkv, D]``.

    ``mask`` is ``[N, M]`` or ``[Hq, N, M]``.  Returns ``out [N, Hq, D]``, ``lse [Hq, N]`` and the
    probabilities ``[Hq, N, M]``; a query that sees nothing gives zeros and ``-inf``.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    if k.shape[0] == 0:
        return torch.zeros_like(q), scores.new_full(scores.shape[:2], float("-inf")), scores
    dead = ~mask.any(dim=-1)
    lse = torch.logsumexp(scores.masked_fill(dead[..., None], 0.0), dim=-1)
    probs = torch.exp(scores - lse[..., None])
    lse = lse.masked_fill(dead, float("-inf"))
    return torch.einsum("hnm,mhd->nhd", probs, v), lse, probs


def compressed_mask(
    num_q: int, num_k: int, num_cmp: int, cmp_block_size: int, cmp_stride: int
) -> torch.Tensor:
    """``[num_q, num_cmp]``: whether the whole compressed block lies at or before the query."""
    query = torch.arange(num_q)[:, None] + num_k - num_q
    last_token = torch.arange(num_cmp)[None] * cmp_stride + cmp_block_size - 1
    return last_token <= query


def block_scores(
    probs: torch.Tensor,
    num_blocks: int,
    num_kv_heads: int,
    cmp_block_size: int,
    cmp_stride: int,
    sel_block_size: int,
) -> torch.Tensor:
    """Equations 9 and 10: ``[Hq, N, C]`` probabilities to ``[Hkv, N, num_blocks]`` scores.

    The paper counts blocks from one: with that, ``(l'/d) j - m - n`` runs over the compressed
    blocks that overlap selection block ``j``, each as often as the strides that they share.
    """
    num_cmp = probs.shape[-1]
    scores = probs.new_zeros((*probs.shape[:-1], num_blocks))
    for j in range(1, num_blocks + 1):
        for m in range(sel_block_size // cmp_stride):
            for n in range(cmp_block_size // cmp_stride):
                i = sel_block_size // cmp_stride * j - m - n
                if 1 <= i <= num_cmp:
                    scores[..., j - 1] += probs[..., i - 1]
    group = scores.shape[0] // num_kv_heads
    return scores.view(num_kv_heads, group, *scores.shape[1:]).sum(dim=1)


def select_reference(
    scores: torch.Tensor,
    num_k: int,
    sel_block_size: int,
    top_n: int,
    num_init_blocks: int,
    num_local_blocks: int,
) -> torch.Tensor:
    """Equation 11 with forced blocks: ``[Hkv, N, J]`` scores to ``[N, Hkv, top_n]`` int32.

    Indices ascend, ``-1`` fills up; equal scores go to the lower index.
    """
    num_kv_heads, num_q, _ = scores.shape
    chosen = torch.full((num_q, num_kv_heads, top_n), -1, dtype=torch.int32)
    for i in range(num_q):
        own = (i + num_k - num_q) // sel_block_size
        for head in range(num_kv_heads):

            def rank(j: int, head: int = head, i: int = i, own: int = own) -> tuple[float, int]:
                forced = j < num_init_blocks or j > own - num_local_blocks
                return (float("-inf") if forced else -float(scores[head, i, j]), j)

            best = sorted(sorted(range(own + 1), key=rank)[:top_n])
            chosen[i, head, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return chosen


def selected_mask(
    block_indices: torch.Tensor, num_k: int, sel_block_size: int, group: int
) -> torch.Tensor:
    """``[Hq, N, num_k]``: causal and inside one of the query's blocks ``[N, Hkv, S]``."""
    num_q = block_indices.shape[0]
    key = torch.arange(num_k)
    in_block = (block_indices[..., None] == key // sel_block_size).any(dim=2)
    causal = key[None] <= torch.arange(num_q)[:, None] + num_k - num_q
    return (in_block & causal[:, None]).transpose(0, 1).repeat_interleave(group, dim=0)


def sliding_mask(num_q: int, num_k: int, window_size: int) -> torch.Tensor:
    """``[num_q, num_k]``: the latest ``window_size`` keys, the query's own included."""
    query = torch.arange(num_q)[:, None] + num_k - num_q
    key = torch.arange(num_k)[None]
    return (key <= query) & (key > query - window_size)


@dataclass(frozen=True)
class NSAReference:
    """Results of :func:`nsa_reference`, batched as the inputs were.

    Args:
        out: gated sum ``[B, N, Hq, D]``.
        out_cmp: output of the compressed branch ``[B, N, Hq, D]``.
        out_slc: output of the selected branch.
        out_swa: output of the sliding branch.
        lse_cmp: log-sum-exp of the compressed branch ``[B, Hq, N]``.
        block_indices: ``[B, N, Hkv, top_n]`` int32.
        scores: block scores of each sequence, ``[Hkv, N_s, J_s]``.
    """

    out: torch.Tensor
    out_cmp: torch.Tensor
    out_slc: torch.Tensor
    out_swa: torch.Tensor
    lse_cmp: torch.Tensor
    block_indices: torch.Tensor
    scores: list[torch.Tensor]


def nsa_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor,
    *,
    phi_k: Callable[[torch.Tensor], torch.Tensor] | None = None,
    phi_v: Callable[[torch.Tensor], torch.Tensor] | None = None,
    block_indices: torch.Tensor | None = None,
    cmp_block_size: int = 32,
    cmp_stride: int = 16,
    sel_block_size: int = 64,
    top_n: int = 16,
    num_init_blocks: int = 1,
    num_local_blocks: int = 2,
    window_size: int = 512,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> NSAReference:
    """Equation 5 with shared K and V, computed in the dtype of its inputs (pass fp64).

    Args:
        q: ``[B, N, Hq, D]``; queries are the last N of the M tokens.
        k: ``[B, M, Hkv, D]``.
        v: ``[B, M, Hkv, D]``.
        g_cmp: gate of the compressed branch ``[B, N, Hq]``.
        g_slc: gate of the selected branch ``[B, N, Hq]``.
        g_swa: gate of the sliding branch ``[B, N, Hq]``.
        phi_k: maps ``[C, l, Hkv, D]`` to ``[C, Hkv, D]``; the mean when ``None``.
        phi_v: maps the blocks of values; the mean when ``None``.
        block_indices: a selection to use instead of the one that the scores give.
        cu_seqlens: ``[S + 1]`` offsets of packed sequences (B = 1, N = M).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    if cu_seqlens is None:
        spans = [(b, slice(None), slice(None)) for b in range(q.shape[0])]
    else:
        edges = [slice(lo, hi) for lo, hi in pairwise(cu_seqlens.tolist())]
        spans = [(0, edge, edge) for edge in edges]
    parts: list[tuple[torch.Tensor, ...]] = []
    all_scores: list[torch.Tensor] = []
    for b, rows, cols in spans:
        qs, ks, vs = q[b, rows], k[b, cols], v[b, cols]
        num_q, num_k = qs.shape[0], ks.shape[0]
        k_cmp = compress_reference(ks, cmp_block_size, cmp_stride, phi_k)
        v_cmp = compress_reference(vs, cmp_block_size, cmp_stride, phi_v)
        seen = compressed_mask(num_q, num_k, k_cmp.shape[0], cmp_block_size, cmp_stride)
        out_cmp, lse_cmp, probs = masked_attention(qs, k_cmp, v_cmp, seen, scale)
        scores = block_scores(
            probs.detach(),
            -(-num_k // sel_block_size),
            k.shape[2],
            cmp_block_size,
            cmp_stride,
            sel_block_size,
        )
        if block_indices is None:
            chosen = select_reference(
                scores, num_k, sel_block_size, top_n, num_init_blocks, num_local_blocks
            )
        else:
            chosen = block_indices[b, rows]
        mask = selected_mask(chosen, num_k, sel_block_size, group)
        out_slc, _, _ = masked_attention(qs, ks, vs, mask, scale)
        out_swa, _, _ = masked_attention(qs, ks, vs, sliding_mask(num_q, num_k, window_size), scale)
        out = (
            g_cmp[b, rows, :, None] * out_cmp
            + g_slc[b, rows, :, None] * out_slc
            + g_swa[b, rows, :, None] * out_swa
        )
        parts.append((out, out_cmp, out_slc, out_swa, lse_cmp.T, chosen))
        all_scores.append(scores)
    join = torch.stack if cu_seqlens is None else _pack
    out, out_cmp, out_slc, out_swa, lse, chosen = (join(list(x)) for x in zip(*parts, strict=True))
    return NSAReference(out, out_cmp, out_slc, out_swa, lse.transpose(1, 2), chosen, all_scores)


def _pack(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts)[None]

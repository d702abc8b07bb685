"""Gates of SeerAttention-R (arXiv 2506.08889) for single tokens, in torch."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cpu.plan import TokenScoring
from sparsek_kernels.paged.index.cpu import Tokens, completed_blocks, select_tokens
from sparsek_kernels.paged.index.rope import rotated, unrotated
from sparsek_kernels.paged.index.seer.gates import NORM_EPS, Gates, view_gate_keys
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import ceil_div

_BLOCKS = 64
"""Blocks whose keys are pooled at once: bounds scratch."""


def select(operands: PagedOperands, segment: Segment, gates: Gates) -> torch.Tensor:
    """Torch form of :meth:`Seer.select`."""
    rotation = segment.batch.rotation

    def score(tokens: Tokens) -> torch.Tensor:
        queries = gate_queries(tokens.q, tokens.positions, gates, rotation)
        kept = view_gate_keys(
            operands.summary, operands.page_size, segment.policy.sel_block_size, queries.shape[-1]
        )
        return gate_scores(queries, kept, tokens.scoring)

    return select_tokens(operands, segment, score)


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """RMS norm of the last dimension; ``x`` as it is where the gate has none."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * weight


def gate_queries(
    q: torch.Tensor, where: torch.Tensor, gates: Gates, rotation: torch.Tensor | None
) -> torch.Tensor:
    """Gate queries ``[T, Hkv, D]`` float32 of ``q``, ``[T, Hkv, G, D]`` at ``where`` ``[T]``."""
    plain = unrotated(q, rotation, where).float()
    mixed = torch.einsum("thgi,hgio->tho", plain, gates.query)
    return rotated(normed(mixed, gates.query_norm), rotation, where)


def gate_keys(
    keys: torch.Tensor, first: torch.Tensor, gates: Gates, rotation: torch.Tensor | None
) -> torch.Tensor:
    """Gate keys ``[n, Hkv, D]`` float32 of blocks ``keys [n, Hkv, size, D]`` from ``first`` on."""
    size = keys.shape[2]
    positions = (first[:, None] + torch.arange(size)).flatten()
    plain = unrotated(keys.transpose(1, 2).flatten(0, 1), rotation, positions).float()
    plain = plain.unflatten(0, (-1, size))
    pooled = torch.cat([plain.amax(1), plain.amin(1), plain.mean(1)], -1)
    mixed = torch.einsum("nhi,hio->nho", pooled, gates.key)
    return rotated(normed(mixed, gates.key_norm), rotation, first)


def write_gate_keys_eager(
    k_cache: torch.Tensor, k_summary: torch.Tensor, batch: PagedBatch, size: int, gates: Gates
) -> None:
    """Torch form of :meth:`Seer.write`, for blocks of ``size``."""
    page_size, dim = k_cache.shape[2:]
    requests, blocks = completed_blocks(batch, size)
    kept = view_gate_keys(k_summary, page_size, size, dim)
    for begin in range(0, blocks.numel(), _BLOCKS):
        part = slice(begin, begin + _BLOCKS)
        first = blocks[part] * size
        pages = batch.block_table[requests[part], first // page_size].long()
        places = first % page_size // size
        keys = k_cache.unflatten(2, (-1, size))[pages, :, places]
        kept[pages, :, places] = gate_keys(keys, first, gates, batch.rotation)


def gate_scores(queries: torch.Tensor, kept: torch.Tensor, scoring: TokenScoring) -> torch.Tensor:
    """Scores of the first blocks of tokens' sequences, ``[T, Hkv, blocks]`` float32.

    ``queries`` are of :func:`gate_queries`, ``kept`` the pages' gate keys.
    """
    count = scoring.num_blocks
    pages = scoring.table[:, : ceil_div(count, kept.shape[2])]
    keys = kept[pages].transpose(1, 2).flatten(2, 3)[:, :, :count]  # [T, Hkv, blocks, D]
    logits = torch.matmul(keys, queries.unsqueeze(-1)).squeeze(-1) * queries.shape[-1] ** -0.5
    if scoring.future is not None:
        logits.masked_fill_(scoring.future, float("-inf"))  # blocks past the end may hold NaN
    return torch.softmax(logits, dim=-1)

"""Scores of InfLLM-v2 (arXiv 2509.24663) for single tokens, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparsek_kernels.paged.cpu.gather import block_reader, locate_blocks
from sparsek_kernels.paged.cpu.plan import TokenScoring
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy

_LOGITS = 1 << 24
"""Elements of scratch that one pass over queries may fill."""


def infllm_scores(
    q: torch.Tensor,
    where: torch.Tensor,
    k_cache: torch.Tensor,
    plan: TokenScoring,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores of the blocks before the last token's own, ``[T, Hkv, blocks]`` float32.

    Args:
        q: ``[T, Hkv, G, D]`` at the positions ``where`` ``[T]``.
        k_cache: ``[P, Hkv, page_size, D]``.
        plan: where the keys of the tokens' sequences are.
    """
    blocks = plan.index.num_blocks
    tables = plan.index.table
    if tables.shape[0] > 1:  # sequences are read one after the other, which bounds what is copied
        rows = [
            _scores_of_sequence(
                q[row : row + 1], where[row : row + 1], k_cache, table, blocks, rule, softmax_scale
            )
            for row, table in enumerate(tables)
        ]
        return torch.cat(rows)
    return _scores_of_sequence(q, where, k_cache, tables[0], blocks, rule, softmax_scale)


def _scores_of_sequence(
    q: torch.Tensor,
    where: torch.Tensor,
    k_cache: torch.Tensor,
    table: torch.Tensor,
    blocks: int,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    means = semantic_kernels(k_cache, table, blocks, rule.sel_block_size)
    step = max(_LOGITS // (q.shape[1] * q.shape[2] * means.shape[1]), 1)
    parts = []
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        logits = torch.matmul(q[part].float() * softmax_scale, means.mT)
        last_key = torch.arange(means.shape[1]) * CELL_SIZE + 2 * CELL_SIZE - 1
        future = last_key > where[part, None]
        shares = torch.softmax(logits.masked_fill_(future[:, None, None], float("-inf")), dim=-1)
        parts.append(_pooled(shares.sum(2), blocks, rule.sel_block_size // CELL_SIZE))
    return torch.cat(parts)


def semantic_kernels(
    k_cache: torch.Tensor, table: torch.Tensor, blocks: int, sel_block_size: int
) -> torch.Tensor:
    """Means ``[Hkv, kernels, D]`` float32 of 32 keys every 16, of a sequence's first blocks.

    The last one ends in the block behind them.  Kernels past the sequence's end are undefined.

    Args:
        table: ``[W]`` int64 page table row.
    """
    reader = block_reader(k_cache, sel_block_size)
    names = locate_blocks(reader, table[None], blocks + 1, sel_block_size)
    keys = reader.read(names)[0].flatten(1, 3).float()  # [Hkv, keys, D]
    cells = keys.unflatten(1, (-1, CELL_SIZE)).mean(2)
    count = blocks * sel_block_size // CELL_SIZE
    return (cells[:, :count] + cells[:, 1 : count + 1]) / 2


def _pooled(shares: torch.Tensor, blocks: int, per_block: int) -> torch.Tensor:
    """Of each block the highest share of the kernels that overlap it: its own and the one before.

    Args:
        shares: ``[T, Hkv, kernels]``.
    """
    padded = F.pad(shares, (1, 0))  # before the first block there is none
    pooled: torch.Tensor = padded.unfold(-1, per_block + 1, per_block)[..., :blocks, :].amax(-1)
    return pooled

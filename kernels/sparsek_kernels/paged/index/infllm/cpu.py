"""Scores of InfLLM-v2 (arXiv 2509.24663) for single tokens, in torch."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.cpu.gather import block_reader, locate_blocks
from sparsek_kernels.paged.index.cpu import Tokens, select_tokens
from sparsek_kernels.paged.index.rope import unrotated
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, ceil_div

_LOGITS = 1 << 24
"""Elements of scratch that one pass over queries may fill."""


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Torch form of :meth:`InfLLM.select`: a CPU scores the keys themselves."""
    batch, policy = segment.batch, segment.policy
    lengths, _ = host_lengths(batch)
    kept: dict[int, torch.Tensor] = {}  # the means of the request in hand, for all of its tokens

    def score(tokens: Tokens) -> torch.Tensor:
        scoring, first = tokens.scoring, 0
        q = unrotated(tokens.q, batch.rotation, tokens.positions)
        scores = q.new_zeros(*q.shape[:2], scoring.num_blocks, dtype=torch.float32)
        for request, run in groupby(tokens.requests.tolist()):
            rows = slice(first, first + len(list(run)))
            if request not in kept:
                table = scoring.table[first if scoring.table.shape[0] > 1 else 0]
                blocks = ceil_div(lengths[request], policy.sel_block_size)
                means = semantic_kernels(operands.k_cache, table, blocks, policy, batch.rotation)
                kept.clear()
                kept[request] = means
            found = infllm_scores(
                q[rows], tokens.positions[rows], kept[request], policy, operands.softmax_scale
            )
            blocks = min(found.shape[-1], scoring.num_blocks)
            scores[rows, :, :blocks] = found[..., :blocks]
            first = rows.stop
        return scores

    return select_tokens(operands, segment, score)


def semantic_kernels(
    k_cache: torch.Tensor,
    table: torch.Tensor,
    blocks: int,
    rule: SelectionPolicy,
    rotation: torch.Tensor | None,
) -> torch.Tensor:
    """Means ``[Hkv, kernels, D]`` float32 of 32 keys every 16, which lie in the first ``blocks``.

    They are of keys turned back by ``rotation``; those past the sequence's end are undefined.
    """
    size = rule.sel_block_size
    reader = block_reader(k_cache, size)
    names = locate_blocks(reader, table[None], blocks, size)
    keys = reader.read(names)[0].flatten(1, 3).float()  # [Hkv, keys, D]
    places = torch.arange(keys.shape[1])
    keys = unrotated(keys.transpose(0, 1), rotation, places).transpose(0, 1)
    cells = keys.unflatten(1, (-1, CELL_SIZE)).mean(2)
    means: torch.Tensor = (cells[:, :-1] + cells[:, 1:]) / 2
    return means


def infllm_scores(
    q: torch.Tensor,
    where: torch.Tensor,
    kernels: torch.Tensor,
    rule: SelectionPolicy,
    softmax_scale: float,
) -> torch.Tensor:
    """Scores of all but a sequence's last block for its tokens, ``[T, Hkv, blocks]`` float32.

    ``q [T, Hkv, G, D]`` is at the positions ``where``; ``kernels`` reach the last token at least.
    """
    per_block = rule.sel_block_size // CELL_SIZE
    last_key = torch.arange(kernels.shape[1]) * CELL_SIZE + 2 * CELL_SIZE - 1
    step = max(_LOGITS // (q.shape[1] * q.shape[2] * kernels.shape[1]), 1)
    parts = []
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        logits = torch.matmul(q[part].float() * softmax_scale, kernels.mT)
        future = (last_key > where[part, None])[:, None, None]
        shares = torch.softmax(logits.masked_fill_(future, float("-inf")), dim=-1).sum(2)
        # A block's kernels are its own and the one before; before the first block there is none.
        overlapping = F.pad(shares, (1, 0)).unfold(-1, per_block + 1, per_block)
        parts.append(overlapping.amax(-1))
    return torch.cat(parts)

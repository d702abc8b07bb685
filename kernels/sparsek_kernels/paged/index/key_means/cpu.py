"""Scores of single tokens by the quantised key means, in torch."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.cpu.held import HeldPages
from sparsek_kernels.paged.cpu.plan import SummaryIndex
from sparsek_kernels.paged.index.cpu import Tokens, select_tokens
from sparsek_kernels.paged.index.key_means.sketch import VECTOR_SIZE, read_vectors, rotate
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import ceil_div


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Torch form of :meth:`KeyMeans.select`."""
    size, page_size = segment.policy.sel_block_size, operands.page_size
    held = segment.batch.block_table >= 0

    def score(tokens: Tokens) -> torch.Tensor:
        vectors = _read(operands.summary, tokens.scoring.index, page_size, size, tokens.q.shape[-1])
        logits = torch.matmul(rotate(tokens.q.float()) * operands.softmax_scale, vectors.mT)
        logits = logits.unflatten(-1, (-1, size // VECTOR_SIZE)).amax(-1)
        if operands.ranks is not None:
            here = HeldPages(held.index_select(0, tokens.requests), page_size)
            blocks = torch.arange(logits.shape[-1]).expand(*logits.shape[:2], -1)
            logits = here.complete(logits, blocks, size, operands.ranks.largest)
        if tokens.scoring.future is not None:  # blocks past the end may hold NaN
            logits.masked_fill_(tokens.scoring.future, float("-inf"))
        return torch.softmax(logits, dim=-1).sum(2)

    return select_tokens(operands, segment, score)


def _read(
    k_summary: torch.Tensor, index: SummaryIndex, page_size: int, size: int, dim: int
) -> torch.Tensor:
    """``[T, Hkv, vectors of the scored blocks, D]`` float32, rotated as the sketch is."""
    tokens = index.num_blocks * size
    pages = index.table[:, : ceil_div(tokens, page_size)]
    rows = k_summary[pages].transpose(1, 2)  # [T, Hkv, W, bytes]
    return read_vectors(rows, page_size, dim).flatten(2, 3)[:, :, : tokens // VECTOR_SIZE]

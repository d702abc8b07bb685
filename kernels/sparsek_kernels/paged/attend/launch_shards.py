"""Launching decodes over the pages of one rank: shared selection, partial output, log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.launch.attend import attend, selected_blocks
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SelectionPolicy


def attend_shard(
    operands: PagedOperands,
    batch: PagedBatch,
    rule: SelectionPolicy,
    largest: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Triton form of :func:`sparsek_kernels.paged.attend_shard`; writes ``operands.out``.

    Args:
        rule: per token.

    Returns:
        ``[T, Hq]`` float32 log-sum-exp.
    """
    lse = operands.q.new_full(operands.q.shape[:2], float("-inf"), dtype=torch.float32)
    operands.out.zero_()  # rows of padding, which no program writes
    selected, _ = selected_blocks(operands, batch, rule, largest)
    attend(replace(operands, lse=lse), batch, rule, selected, decode=True)
    return lse

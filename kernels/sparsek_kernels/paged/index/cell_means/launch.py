"""Launching the choice of prefill tiles: scores by means, then a sample of the blocks."""

from __future__ import annotations

import torch

from sparsek_kernels.paged.index.cell_means.launch_scores import score_tiles
from sparsek_kernels.paged.index.launch import SCRATCH_ELEMENTS, Scores, new_selection, top_blocks
from sparsek_kernels.paged.index.problem import Step
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.scratch import workspace


def select(operands: PagedOperands, segment: Segment) -> torch.Tensor:
    """Triton form of :meth:`CellMeans.select`."""
    call, chooses = new_selection(operands, segment)
    if not chooses or call.tiles is None:
        return call.out
    q, heads, width, count = call.q, call.heads, call.width, call.tiles.shape[0]
    most = max(min(SCRATCH_ELEMENTS // (heads * width), count), 1)
    scores = workspace(q.device, "scores", most * heads * width, torch.float32)
    for first in range(0, count, most):
        step = Step(first, min(most, count - first))
        score_tiles(scores, call, step.first, step.count)
        top_blocks(call, step, Scores(scores, (heads * width, width, 0)))
    return call.out

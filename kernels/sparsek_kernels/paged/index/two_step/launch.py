"""Launching the two steps of prefill tiles: scores by means, candidates, block probabilities."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.paged.index.launch import SCRATCH_ELEMENTS, Scores, new_selection, top_blocks
from sparsek_kernels.paged.index.problem import Step
from sparsek_kernels.paged.index.two_step.launch_probabilities import rank_blocks, tiles_ranked
from sparsek_kernels.paged.index.two_step.launch_scores import score_tiles
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.scratch import workspace


def select(
    operands: PagedOperands, segment: Segment, kept: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Triton form of :meth:`TwoStep.select`; ``kept`` gets the candidates of each step."""
    call, chooses = new_selection(operands, segment)
    if not chooses or call.tiles is None:
        return call.out
    q, heads, width, count = call.q, call.heads, call.width, call.tiles.shape[0]
    scored = max(min(SCRATCH_ELEMENTS // (heads * width), count), 1)
    ranked = tiles_ranked(call, SCRATCH_ELEMENTS)
    scores = workspace(q.device, "scores", scored * heads * width, torch.float32)
    for first in range(0, count, scored):
        end = min(first + scored, count)
        score_tiles(scores, call, first, end - first)
        for begin in range(first, end, ranked):
            step = Step(begin, min(ranked, end - begin))
            mine = Scores(scores[(begin - first) * heads * width :], (heads * width, width, 0))
            shape = (step.count, heads, call.policy.listed_blocks)
            numel = math.prod(shape)
            candidates = workspace(q.device, "candidates", numel, torch.int32)[:numel].view(shape)
            top_blocks(call, step, candidates, mine)
            rank_blocks(call, step, candidates)
            if kept is not None:
                kept.append(candidates.clone())
    return call.out

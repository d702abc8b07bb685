"""What the indexers share on a GPU: rows of indices, steps of bounded scratch, exact top-n."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from sparsek_kernels.common.operators import pointers
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.config import next_power_of_2, top_warps
from sparsek_kernels.paged.index.kernels.top_blocks import top_blocks_kernel
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, first_sparse
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.scratch import MOST_ROWS, overlap_options, rows_per_step

SCRATCH_ELEMENTS = 1 << 24
"""Most float32 elements (64 MiB) of one scratch tensor of scores; larger steps go in batches."""


@dataclass(frozen=True)
class Scores:
    """What the blocks of a step's tiles are ranked by.

    Args:
        values: float32, flat, from the step's first tile on.
        strides: from tile to tile, KV head to KV head, and row to row of a KV head.
        logit_rows: rows of base-2 logits of each KV head, whose probabilities are added up; 0: the
            values are scores already.
    """

    values: torch.Tensor
    strides: tuple[int, int, int]
    logit_rows: int = 0


def new_selection(operands: PagedOperands, segment: Segment) -> tuple[Selection, bool]:
    """A segment's choice with room for its indices, and whether any tile chooses.

    Where none does, all rows are -1 already.
    """
    q, batch, policy = operands.q, segment.batch, segment.policy
    tiles = None
    count = batch.num_decodes if segment.by_request else batch.num_decode_tokens
    if not segment.decodes:
        tiles = prefill_tiles(batch, policy.query_tile, q.shape[0])
        count = tiles.shape[0]
    shape = (count, operands.heads, policy.scored_blocks)
    chooses = segment.chooses(operands.page_size)
    if count and not chooses:  # one row for all: it may be longer than any context
        out = q.new_full((1, 1, policy.scored_blocks), -1, dtype=torch.int32).expand(shape)
    else:
        out = torch.empty(shape, dtype=torch.int32, device=q.device)
    return Selection(out, operands, batch, policy, tiles), chooses and count > 0


def select_tokens(
    operands: PagedOperands,
    segment: Segment,
    score: Callable[[Selection, Step, int], Scores],
    room: Callable[[Selection], int],
) -> torch.Tensor:
    """Indices of single tokens: of decodes, or of prefills whose tiles are single tokens.

    Args:
        score: scores of a step's tokens; its last argument is the tokens of the largest step.
        room: scratch elements that one token takes.
    """
    call, chooses = new_selection(operands, segment)
    if not chooses:
        return call.out
    if call.tiles is None:
        _select_decodes(call, score, room)
        return call.out
    first = call.batch.first_row + call.batch.num_decode_tokens
    step = rows_per_step(call.batch.block_table.shape[1])
    for begin in range(first, call.q.shape[0], step):
        end = min(begin + step, call.q.shape[0])
        _select_decodes(call.of_tokens(begin, end, call.out[begin - first :]), score, room)
    return call.out


def _select_decodes(
    call: Selection,
    score: Callable[[Selection, Step, int], Scores],
    room: Callable[[Selection], int],
) -> None:
    batch, length = call.batch, call.batch.decode_query_len
    most = SCRATCH_ELEMENTS // (length * room(call))
    requests = max(min(most, batch.num_decodes, MOST_ROWS // length), 1)
    for first in range(0, batch.num_decodes, requests):
        here = min(requests, batch.num_decodes - first)
        step = Step(first * length, here * length)
        # Scratch of the last step is as large as of the others: its size decides what is compiled.
        top_blocks(call, step, call.out, score(call, step, requests * length))


def top_blocks(call: Selection, step: Step, out: torch.Tensor, scores: Scores) -> None:
    """Write the best blocks of single tokens of a step, or a sample of them, a tile's candidates.

    Args:
        out: ``[tiles, Hkv, blocks]`` int32, rows as :func:`top_blocks_kernel` says.
    """
    batch, policy = call.batch, call.policy
    # No row of a shorter sequence is sorted, so its batch needs no kernel of its own.
    blocks = max(call.max_blocks, _fewest_blocks(policy), 16)
    warps, registers = top_warps(blocks)
    tiles = call.tiles is not None
    run(
        top_blocks_kernel, (step.count, call.heads),
        out, scores.values, *pointers(batch.seq_lens, call.tiles),
        batch.seq_lens, batch.cu_seqlens_q, policy.dense_below, step.first, call.width,
        *out.stride()[:2], *scores.strides,
        FROM_LOGITS=scores.logit_rows > 0, GROWTH=policy.growth if tiles else None,
        COUNT=out.shape[2], DRAW_ROWS=policy.samples * call.group if tiles else 0,
        MAX_BLOCKS=next_power_of_2(blocks), num_warps=warps, maxnreg=registers,
        **call.tile_keys() | ({"GROUP": scores.logit_rows} if scores.logit_rows else {}),
        **overlap_options(scores.values.device),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _fewest_blocks(policy: SelectionPolicy) -> int:
    """Blocks of the shortest sequence of which some are chosen."""
    return first_sparse(policy, 0, 1 << 31) // policy.sel_block_size + 1

"""Decoding on a CPU in one call of a C function.

The torch path (``attend/cpu.py``) copies the blocks that a token attends and takes about fifty
calls for a layer.  Where a C compiler is at hand, decodes over bfloat16 and float32 caches go
through ``decode.c`` instead: the same rule, float32 arithmetic, no copies of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from struct import Struct

import torch

from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.policy import SEGMENT, SelectionPolicy, ceil_div
from sparsek_kernels.paged.record import VECTORS

_MOST_DIM, _MOST_ROWS = 256, 64
_UNIT = 2
"""Numbers that ``decode.c`` keeps of a list and KV head."""
RUN = 64
"""Tokens that ``decode.c`` goes by where none are chosen."""
_PIECES_PER_THREAD = 4
"""Pieces of work for each thread, so that none waits long for the last."""


_ARGUMENTS = Struct("@11q f 5q5q5q5q 3q 2q 2q 4q")
"""``Decode`` of ``decode.h``: sizes, factors, rows of q, out, K and V, what the pages keep, the
table, then pointers to what is read and to what is written.  Packing takes a third of what ctypes
takes."""


def supports(operands: PagedOperands, batch: PagedBatch, together: int = 1) -> bool:
    """Whether the C function decodes these tensors; the torch path does where it does not.

    Args:
        together: most tokens that choose together.
    """
    k_cache, v_cache, table = operands.k_cache, operands.v_cache, batch.block_table
    dtype, dim = k_cache.dtype, k_cache.shape[-1]
    summary = operands.k_summary
    return (
        operands.q.device.type == "cpu"
        and operands.q.dtype == dtype
        and dtype in (torch.bfloat16, torch.float32)
        and v_cache.dtype == dtype
        and (summary is None or summary.stride(-1) == 1)
        and table.dtype == torch.int32
        and table.stride(-1) == 1
        and k_cache.shape == v_cache.shape
        and k_cache.stride(-1) == v_cache.stride(-1) == 1
        and k_cache.shape[2] % 16 == 0
        and dim <= _MOST_DIM
        and operands.group * together <= _MOST_ROWS
        and build.library() is not None
    )


def plan_tokens(batch: PagedBatch, rule: SelectionPolicy) -> torch.Tensor:
    """Blocks that each decoded token attends: ``[0, front)``, the best ``picks``, ``[local, own]``.

    Blocks are cells of two tokens, with whole segments before the first candidate and between it
    and ``local``; a row of the plan is then of all new tokens of a request, of which the later ones
    see the keys between.  Tokens that choose none count in runs of 64 tokens instead.

    Returns:
        ``[lists, 9]`` int64: request, row of q, tokens, position of the first one, front, most
        picks, local, and a range of keys not seen.
    """
    rows, row = [], 0
    for request, (length, count) in enumerate(zip(*host_lengths(batch), strict=True)):
        if request == batch.num_decodes:
            break
        start = length - count
        shared = rule.alignment > 0  # what the first token sees decides for all
        together = count if shared and not rule.sees_all(start) else 1
        for token in range(0, count, max(together, 1)):
            position = start + token
            dense = rule.sees_all(start if shared else position)
            blocks = _blocks_of(rule, position, dense)
            rows.append((request, row + token, together, *blocks))
        row += count
    return torch.tensor(rows, dtype=torch.int64).view(-1, 9)


def _blocks_of(rule: SelectionPolicy, position: int, dense: bool) -> tuple[int, ...]:
    runs = position // RUN + 1
    if dense:
        return position, runs, 0, runs, 0, 0
    sinks, start = rule.num_sink, position + 1 - (rule.window_size or 0)
    if rule.selects_blocks:
        first, local = rule.candidate_range(position)
        if rule.scored_blocks:
            return position, first, rule.scored_blocks, local, 0, 0
        sinks, start = first * rule.sel_block_size, local * rule.sel_block_size
    local = start // RUN
    return position, min(ceil_div(sinks, RUN), local), 0, local, sinks, start


def _rows(x: torch.Tensor) -> tuple[int, ...]:
    """``Rows`` of a cache, or of ``[T, Hq, D]``: a token is then a page of one row."""
    first, head, *row = x.stride()
    return x.data_ptr(), first, head, row[0], x.dtype == torch.bfloat16


def decode(
    operands: PagedOperands, batch: PagedBatch, rule: SelectionPolicy, *, keeps_lists: bool = False
) -> torch.Tensor | None:
    """Attention of the tokens that ``batch`` decodes under a per-token rule: writes their rows.

    ``operands`` have the decodes' rows of ``q`` and ``out``.

    Returns:
        With ``keeps_lists`` what each row of the plan chose, ``[lists, Hkv, picks]`` int32, -1
        behind: entries as an indexer's.
    """
    built = build.library()
    if built is None:
        raise RuntimeError("decode: expected a C compiler, found none; ask supports() first")
    sized = batch.derived(("native", rule), lambda: _sized_plan(batch, rule))
    lists, dim = len(sized.plan), operands.q.shape[2]
    heads, group = operands.k_cache.shape[1], operands.group
    rows = sized.together * group
    units = lists * heads
    if not units:
        return None
    threads = torch.get_num_threads()
    splits = max(_PIECES_PER_THREAD * threads // units, 2 if keeps_lists else 1)
    slots = threads if splits == 1 else units
    table = batch.block_table
    q, out = operands.q, operands.out
    if q.stride(-1) != 1:
        q = q.contiguous()
    result = out if out.stride(-1) == 1 else out.contiguous()
    sink_logits = None if operands.sinks is None else operands.sinks.float().contiguous()
    scores = _choice_size(rows, sized.blocks)
    sizes = (  # of scores, chosen, units and parts: four bytes each
        slots * scores,
        slots * (sized.picks + 1),
        slots * _UNIT,
        slots * splits * rows * (ceil_div(dim, 32) * 32 + 2),
    )
    scratch = torch.empty(sum(sizes), dtype=torch.float32)
    starts = accumulate((4 * size for size in sizes[:-1]), initial=scratch.data_ptr())
    arguments = _ARGUMENTS.pack(
        lists, heads, group, rows, dim, operands.k_cache.shape[2], threads, splits,
        sized.blocks, sized.picks, scores, operands.softmax_scale,
        *_rows(q), *_rows(result), *_rows(operands.k_cache), *_rows(operands.v_cache),
        *_summary(operands.summary if sized.picks else None), table.data_ptr(), table.stride(0),
        sized.plan.data_ptr(), 0 if sink_logits is None else sink_logits.data_ptr(), *starts,
    )  # fmt: skip
    built.sparsek_decode(arguments)
    if result is not out:
        out.copy_(result)
    if not keeps_lists:
        return None
    _, chosen, counts, _ = scratch.view(torch.int32).split(sizes)
    behind = torch.arange(sized.picks) >= counts.view(units, _UNIT)[:, :1]
    found: torch.Tensor = chosen.view(units, -1)[:, : sized.picks].masked_fill(behind, -1)
    return found.view(lists, heads, -1)


@dataclass(frozen=True)
class _SizedPlan:
    """A :func:`plan_tokens`, and the most blocks to score, blocks chosen and tokens of a list."""

    plan: torch.Tensor
    blocks: int = 0
    picks: int = 0
    together: int = 1


def _sized_plan(batch: PagedBatch, rule: SelectionPolicy) -> _SizedPlan:
    plan = plan_tokens(batch, rule)
    together = int(plan[:, 2].max()) if len(plan) else 1
    picking = plan[plan[:, 5] > 0]
    if not picking.numel():
        return _SizedPlan(plan, together=together)
    scored = int(picking[:, 3].max()) // SEGMENT * VECTORS  # up to the first token's own segment
    return _SizedPlan(plan, scored, int(picking[:, 5].max()), together)


def _choice_size(rows: int, cells: int) -> int:
    """Floats of a ``Choice`` of ``choose.h``."""
    return rows * (cells + 3 * cells // VECTORS) + cells // 4


def _summary(k_summary: torch.Tensor | None) -> tuple[int, ...]:
    if k_summary is None:
        return 0, 0, 0
    return k_summary.data_ptr(), *k_summary.stride()[:2]

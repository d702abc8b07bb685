"""Launching the choice of cells by records.

Two launches do it where NVIDIA's matrix units take the shapes (``launch_sm80.py``), else four.
Between these, ranks that hold a sequence's pages between them agree on totals, then on keys.
"""

from __future__ import annotations

from functools import reduce

import torch
from triton import knobs

from sparsek_kernels.common.device import device_arch, multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.config import next_power_of_2
from sparsek_kernels.paged.index.launch import new_selection
from sparsek_kernels.paged.index.page_records.config import CHUNK, uses_matrix_units
from sparsek_kernels.paged.index.page_records.kernels.choose import (
    list_cells_kernel,
    rank_cells_kernel,
    total_kernel,
)
from sparsek_kernels.paged.index.page_records.kernels.scores import UNIT, score_records_kernel
from sparsek_kernels.paged.index.page_records.shapes import Rule, Shape
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SEGMENT, ceil_div
from sparsek_kernels.paged.record import VECTORS, record_bytes
from sparsek_kernels.paged.sample import KEYS
from sparsek_kernels.paged.scratch import MOST_ROWS, overlap_options, workspace

_SCRATCH_ELEMENTS = 1 << 26
"""Most float16 elements (128 MiB) of one scratch tensor; larger steps go in batches."""


def select(operands: PagedOperands, segment: Segment) -> Chosen:
    """Triton form of :meth:`PageRecords.select`."""
    call, chooses = new_selection(operands, segment)
    if not chooses:
        return Chosen(call.out)
    batch = call.batch
    width = ceil_div(ceil_div(batch.max_seq_len, SEGMENT), UNIT.value) * UNIT.value
    rule = Rule(call.policy.sink_blocks, call.policy.reach_blocks, call.policy.scored_blocks, KEYS)
    shape = Shape(
        batch.decode_query_len,
        call.heads,
        call.group,
        next_power_of_2(call.group),
        max(next_power_of_2(call.group), 8),
        operands.q.shape[2],
        operands.page_size,
        record_bytes(operands.q.shape[2]),
    )
    if _fits(call, width):
        from sparsek_kernels.paged.index.page_records import launch_sm80

        launch_sm80.choose(call, rule, shape, width, segment.fixed_order)
    else:
        _choose_in_steps(call, rule, shape, width)
    return Chosen(call.out)


def _fits(call: Selection, width: int) -> bool:
    """Whether the matrix units take these tensors, and all programs of a group run at once."""
    q = call.q
    return (
        not knobs.runtime.interpret
        and call.operands.ranks is None
        and torch.version.hip is None
        and uses_matrix_units(device_arch(q.device))
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and call.batch.decode_query_len * call.group <= 16
        and ceil_div(width, 64) <= 2 * multiprocessors(q.device)
    )


def _choose_in_steps(call: Selection, rule: Rule, shape: Shape, width: int) -> None:
    batch, length = call.batch, call.batch.decode_query_len
    most = _SCRATCH_ELEMENTS // (length * call.q.shape[1] * width * VECTORS)
    requests = max(min(most, batch.num_decodes, MOST_ROWS // length), 1)
    for first in range(0, batch.num_decodes, requests):
        step = Step(first, min(requests, batch.num_decodes - first))
        _choose_some(call, rule, shape, width, step, requests)


def _choose_some(
    call: Selection, rule: Rule, shape: Shape, width: int, step: Step, most: int
) -> None:
    """Choose for some requests, of at most ``most``: scratch and kernels are the same for all."""
    q, operands, batch = call.q, call.operands, call.batch
    device, records, ranks = q.device, operands.summary, operands.ranks
    heads = q.shape[1]
    rows = most * shape.QUERY_LEN * heads
    rest = workspace(device, "rest", rows * width * VECTORS, torch.float16)
    base = workspace(device, "base", rows * width, torch.float32)
    gain = workspace(device, "gain", rows * width, torch.float32)
    units = workspace(device, "units", rows * width // UNIT.value, torch.float32)
    totals = workspace(device, "totals", rows, torch.float32)
    keys = workspace(device, "keys", most * call.heads * width * VECTORS, torch.int8)
    counts = workspace(device, "key counts", most * call.heads * KEYS, torch.int32)
    lengths = (batch.seq_lens, batch.cu_seqlens_q)
    overlap = overlap_options(device)
    block_m = next_power_of_2(shape.QUERY_LEN) * shape.HEADS
    shares = 8 * multiprocessors(device) // (step.count * call.heads)
    shares = min(max(shares, 1), width // UNIT.value)
    run(
        score_records_kernel, (shares + shape.QUERY_LEN, call.heads, step.count),
        rest, base, gain, units, totals, counts, q, operands.k_cache, records, batch.block_table,
        *lengths, call.qk_scale, call.policy.dense_below, step.first, width,
        q.stride()[:2], operands.k_cache.stride()[:3], records.stride()[:2],
        batch.block_table.stride(0),
        RULE=rule, SHAPE=shape, BLOCK_H=shape.HEADS, BLOCK_M=max(block_m, 16), num_warps=4,
        **overlap,
    )  # fmt: skip
    constants = {"RULE": rule, "SHAPE": shape, **overlap}
    place = (call.policy.dense_below, step.first, width)
    run(
        total_kernel, (heads, step.count * shape.QUERY_LEN),
        totals, units, *lengths, *place,
        UNITS=min(next_power_of_2(width // UNIT.value), 1024), num_warps=4, **constants,
    )  # fmt: skip
    if ranks is not None:
        written = totals[: step.count * shape.QUERY_LEN * heads]
        totals = reduce(torch.logaddexp2, ranks.gather(written))
    grid = (ceil_div(width, CHUNK), call.heads, step.count)
    run(
        rank_cells_kernel, grid,
        keys, counts, rest, base, gain, totals, *lengths, *place,
        CHUNK=CHUNK, num_warps=4, **constants,
    )  # fmt: skip
    if ranks is not None:
        keys = ranks.largest(keys[: step.count * call.heads * width * VECTORS])
    run(
        list_cells_kernel, (step.count, call.heads),
        call.out, keys, counts, *lengths, *place,
        *call.out.stride()[:2],
        BLOCK=min(next_power_of_2(width * VECTORS), 4096), SHARDED=ranks is not None, num_warps=8,
        **constants,
    )  # fmt: skip

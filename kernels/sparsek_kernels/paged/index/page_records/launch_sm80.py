"""Launching the choice of cells by records on NVIDIA's matrix units: weights, then the cut."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.paged.index.page_records.config import (
    MOST_EACH,
    cut_segments,
    weigh_shares,
)
from sparsek_kernels.paged.index.page_records.kernels.cut_sm80 import WARPS, cut_cells_kernel
from sparsek_kernels.paged.index.page_records.kernels.weigh_sm80 import weigh_cells_kernel
from sparsek_kernels.paged.index.page_records.shapes import Rule, Shape
from sparsek_kernels.paged.index.problem import Selection
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.sample import KEYS
from sparsek_kernels.paged.scratch import overlap_options, workspace

_SCRATCH_BYTES = 1 << 28
"""Most bytes of weights and what goes with them; larger steps go in batches of requests."""


def choose(call: Selection, rule: Rule, shape: Shape, width: int, fixed_order: bool) -> None:
    """Write the entries of the cells that are drawn for a step's requests.

    width: segments of a row of scratch.
    fixed_order: sums are added up in an order that no batch changes.
    """
    rows = shape.QUERY_LEN * shape.GROUP
    shape = shape._replace(COLUMNS=4 if rows <= 4 else ceil_div(rows, 8) * 8)
    each = call.heads * width * 40 * shape.COLUMNS
    most = max(_SCRATCH_BYTES // each // 4 * 4, 4)  # so that rows stay aligned
    for first in range(0, call.batch.num_decodes, most):
        requests = min(most, call.batch.num_decodes - first)
        _choose_some(call, rule, shape, width, fixed_order, first, requests)


def _choose_some(
    call: Selection,
    rule: Rule,
    shape: Shape,
    width: int,
    fixed_order: bool,
    first: int,
    requests: int,
) -> None:
    q, operands, batch = call.q, call.operands, call.batch
    device, records = q.device, operands.summary
    columns = shape.COLUMNS
    jobs = requests * call.heads
    out, table = call.out[first:], batch.block_table[first:]
    lengths = (batch.seq_lens[first:], batch.cu_seqlens_q[first:])
    sms = multiprocessors(device)
    parts = max(columns // 8, 1)
    near = call.policy.sink_blocks // call.policy.segment_blocks
    near += 2 if shape.QUERY_LEN > 1 else 1
    programs, at_once = ceil_div(width, MOST_EACH), 1
    if not fixed_order:
        programs, at_once = weigh_shares(jobs * parts, width, near, sms)
    sums = near + programs
    size = 64 if fixed_order else cut_segments(jobs, width, columns, sms)
    members = ceil_div(width, size)
    weights = workspace(device, "weights", jobs * width * 8 * columns, torch.int32)
    tops = workspace(device, "tops", jobs * width * columns, torch.float32)
    gains = workspace(device, "gains", jobs * width * columns, torch.float32)
    states = workspace(device, "sums", jobs * sums * 2 * columns, torch.float32)
    counts = workspace(device, "counts", jobs * members * KEYS, torch.int32)
    counters = workspace(device, "counters", jobs, torch.int32)
    run(
        weigh_cells_kernel, (jobs * (near + programs * parts),),
        weights.view(torch.uint8), tops, gains, states, counters,
        q, operands.k_cache, records, table,
        *lengths, call.qk_scale, call.policy.dense_below,
        sums, at_once, width,
        q.stride()[:2], operands.k_cache.stride()[:3], records.stride()[:2], table.stride(0),
        RULE=rule, SHAPE=shape,
        num_warps=1,
        maxnreg=128,  # 16 programs on a multiprocessor
        **overlap_options(device),
    )  # fmt: skip
    run(
        cut_cells_kernel, (jobs * members,),
        out, counts, counters, weights.view(torch.uint8), tops, gains, states, *lengths,
        call.policy.dense_below, members, sums, at_once, width,
        out.stride()[:2],
        RULE=rule, SHAPE=shape, TURNS=size // 16, num_warps=WARPS.value, **overlap_options(device),
    )  # fmt: skip

"""An fp64 oracle of decoded tokens by records, which checks a KV head of a few requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsek_backend.bench.ops.paged_inputs import PagedInputs, Tile
from sparsek_backend.bench.registry import GateResult
from sparsek_kernels.paged.attend.reference import attend_reference, list_logs
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.index.page_records import PageRecords
from sparsek_kernels.paged.index.page_records.reference import (
    Choice,
    choose_reference,
    list_error,
)
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy

_SCORES, _ERROR = 0.1, 0.02
"""Most error of scores: weights of 8 bits have 3 behind the leading one.  Most error of the output,
of its largest value."""

Oracle = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Choice | None]
"""Queries, keys and values of a request and KV head on the host, and what the oracle chooses."""


def oracle_of(inputs: PagedInputs, tile: Tile, policy: SelectionPolicy) -> Oracle:
    """What a request's new tokens choose together for one KV head, exactly."""
    count, last = inputs.query_lens[tile.request], tile.rows.stop
    heads = slice(tile.head * inputs.group, (tile.head + 1) * inputs.group)
    q = inputs.q[last - count : last, heads].cpu()
    k, v = (x.cpu()[:, None] for x in inputs.keys_of(tile.request, tile.head))
    return q, k, v, choose_reference(q, k, len(k) - count, policy, inputs.softmax_scale)


def wrong_cells(chosen: torch.Tensor, oracle: Oracle) -> str:
    """Why a list ([places]) is not one that the oracle's scores explain, or an empty string."""
    entries, found = chosen.tolist(), oracle[3]
    if found is None:
        return "" if set(entries) <= {-1} else "cells where everything is seen"
    return list_error(found, 0, entries, _SCORES)


def gate_records(
    inputs: PagedInputs,
    tiles: Sequence[Tile],
    policy: SelectionPolicy,
    out: torch.Tensor,
    batch: PagedBatch,
) -> GateResult:
    """Check the choice of some requests, and their outputs over the kernels' own lists.

    Args:
        inputs: the case.
        tiles: the last token of each of these requests.
        policy: of single tokens.
        out: [T, Hq, D].
        batch: decodes.
    """
    scale = inputs.softmax_scale
    operands = PagedOperands(inputs.q, inputs.k_cache, inputs.v_cache, out, scale, inputs.k_summary)
    chosen, worst = PageRecords().select(operands, Segment(batch, policy)), 0.0
    for tile in tiles:
        oracle = oracle_of(inputs, tile, policy)
        q, k, v, found = oracle
        start, key = len(k) - len(q), torch.arange(len(k))
        visible = (key <= start + torch.arange(len(q))[:, None]).unsqueeze(1)
        rows = slice(tile.rows.stop - len(q), tile.rows.stop)
        heads = slice(tile.head * inputs.group, (tile.head + 1) * inputs.group)
        entries = chosen.indices[tile.request, tile.head].cpu()
        wrong = wrong_cells(entries, oracle)
        logs = None if found is None else list_logs([entries.tolist()], len(k), start, policy)
        exact = attend_reference(q, k, v, visible, scale, logs=logs)
        difference = (out[rows, heads].cpu().double() - exact).abs().max()
        error = float(difference / exact.abs().max())
        if wrong or not error <= _ERROR:
            wrong = wrong or f"output is wrong by {error:.2%}"
            return GateResult(False, f"request {tile.request} head {tile.head}: {wrong}")
        worst = max(worst, error)
    return GateResult(True, f"wrong by {worst:.2%} at most")

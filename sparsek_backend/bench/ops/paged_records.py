"""An fp64 oracle of decoded tokens by records, which checks a KV head of a few requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsek_backend.bench.ops.paged_inputs import PagedInputs, Tile
from sparsek_backend.bench.registry import GateResult
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.index.page_records import PageRecords
from sparsek_kernels.paged.index.page_records.reference import choose_reference
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import attend_reference, list_logs
from sparsek_kernels.paged.sample_reference import Choice, list_error

SCORES, _ERROR = 0.1, 0.02
"""Most error of scores: weights of 8 bits have 3 behind the leading one.  Most error of the output,
of its largest value."""

Oracle = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Choice | None]
"""Queries, keys and values of a request and KV head on the host, and what the oracle chooses."""


def oracle_of(inputs: PagedInputs, tile: Tile, policy: SelectionPolicy) -> Oracle:
    """What a request's new tokens choose together for one KV head, exactly."""
    q = _new_rows(inputs.q, inputs, tile).cpu()
    k, v = (x.cpu()[:, None] for x in inputs.keys_of(tile.request, tile.head))
    return q, k, v, choose_reference(q, k, len(k) - len(q), policy, inputs.softmax_scale)


def _new_rows(x: torch.Tensor, inputs: PagedInputs, tile: Tile) -> torch.Tensor:
    """Rows ``[N, G, D]`` of a request's new tokens, the last of which is the tile's."""
    first = tile.rows.stop - inputs.query_lens[tile.request]
    return inputs.tile_rows(x, replace(tile, rows=range(first, tile.rows.stop)))


def wrong_cells(chosen: torch.Tensor, oracle: Oracle, tolerance: float = SCORES) -> str:
    """Why a list ([places]) is not one that the oracle's scores explain, or an empty string."""
    entries, found = chosen.tolist(), oracle[3]
    if found is None:
        return "" if set(entries) <= {-1} else "cells where everything is seen"
    return list_error(found, 0, entries, tolerance)


def chosen_lists(inputs: PagedInputs, batch: PagedBatch, policy: SelectionPolicy) -> torch.Tensor:
    """``[R, Hkv, places]``: what the kernels choose for the requests of a step of decodes.

    On a CPU the function that decodes in C is asked: it rounds scores in its own way.
    """
    out = torch.empty_like(inputs.q)
    operands = PagedOperands(
        inputs.q, inputs.k_cache, inputs.v_cache, out, inputs.softmax_scale, inputs.k_summary
    )
    if native_decode.supports(operands, batch, max(batch.query_lens)):
        lists = native_decode.decode(operands, batch, policy, keeps_lists=True)
        if lists is not None and len(lists) == len(batch.query_lens):
            return lists
    return PageRecords().select(operands, Segment(batch, policy)).indices


def error_of_output(
    inputs: PagedInputs,
    tile: Tile,
    policy: SelectionPolicy,
    out: torch.Tensor,
    entries: torch.Tensor,
    oracle: Oracle,
) -> float:
    """Error of ``out [T, Hq, D]`` over the kernels' own list, relative to its largest value."""
    q, k, v, found = oracle
    start, key = len(k) - len(q), torch.arange(len(k))
    visible = (key <= start + torch.arange(len(q))[:, None]).unsqueeze(1)
    logs = None if found is None else list_logs([entries.tolist()], len(k), start, policy)
    exact = attend_reference(q, k, v, visible, inputs.softmax_scale, logs=logs)
    difference = (_new_rows(out, inputs, tile).cpu().double() - exact).abs().max()
    return float(difference / exact.abs().max())


def gate_records(
    inputs: PagedInputs,
    tiles: Sequence[Tile],
    policy: SelectionPolicy,
    out: torch.Tensor,
    batch: PagedBatch,
) -> GateResult:
    """Check the choice of some requests, and their outputs over the kernels' own lists.

    Args:
        tiles: the last token of each of these requests.
        policy: of single tokens.
    """
    chosen, worst = chosen_lists(inputs, batch, policy), 0.0
    for tile in tiles:
        oracle = oracle_of(inputs, tile, policy)
        entries = chosen[tile.request, tile.head].cpu()
        error = error_of_output(inputs, tile, policy, out, entries, oracle)
        wrong = wrong_cells(entries, oracle)
        if wrong or not error <= _ERROR:
            wrong = wrong or f"output is wrong by {error:.2%}"
            return GateResult(False, f"request {tile.request} head {tile.head}: {wrong}")
        worst = max(worst, error)
    return GateResult(True, f"wrong by {worst:.2%} at most")

"""Sink-window attention over a sharded stream: each rank fetches sinks and a halo of keys.

A segment of a sequence, positions ``[lo, hi)``, meets the keys ``[0, num_sink)`` and
``[lo - W + 1, hi)``.  Its first ``W - 1`` queries reach into the halo, the others meet keys of the
segment and the sinks alone: those run while the halo is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sparsek_backend.distributed import calls
from sparsek_backend.distributed.calls import Call, Item, calls_of, put_rows
from sparsek_backend.distributed.exchange import Exchange, by_buffer
from sparsek_backend.distributed.layouts import Segment, SequenceLayout
from sparsek_backend.distributed.mesh import Channel
from sparsek_backend.distributed.rows import Piece, Range, Transfers, plan_transfers
from sparsek_kernels.common.operators import new_like, new_lse
from sparsek_kernels.sink_window.spec import AttentionSpec


@dataclass(frozen=True)
class HaloPlan:
    """Exchange and launches of one rank.

    Buffer 0 of a piece holds the rank's own rows.  The rows of each source of sinks follow, then
    the rows of each source of the halo.
    """

    sinks: Transfers
    halo: Transfers  # the exchange of the keys before each segment
    alone: tuple[Call, ...]  # calls that need neither
    after_sinks: tuple[Call, ...]  # calls that need sinks of other ranks
    after_halo: tuple[Call, ...]  # calls that need the halo too


def _query_ranges(segment: Segment, window: int) -> list[Range]:
    """Queries of a segment that reach into its halo, then the others."""
    reach = 0 if segment.start == segment.sequence else min(window - 1, len(segment))
    middle = segment.start + reach
    return [x for x in ((segment.start, middle), (middle, segment.stop)) if x[0] < x[1]]


def _key_ranges(segment: Segment, queries: Range, num_sink: int, window: int) -> list[Range]:
    """Keys that queries meet: sinks, then the window."""
    first, (start, stop) = segment.sequence, queries
    last_sink = min(first + num_sink, stop)
    return [(first, last_sink), (max(last_sink, start - window + 1), stop)]


@lru_cache(maxsize=64)
def plan_halo(
    layout: SequenceLayout, rank: int, num_sink: int, window_size: int, batch: int
) -> HaloPlan:
    """The plan of one rank, from the layout alone."""
    asked = [
        [
            (segment, queries, _key_ranges(segment, queries, num_sink, window_size))
            for segment in segments
            for queries in _query_ranges(segment, window_size)
        ]
        for segments in layout.segments
    ]
    exchanges = [
        plan_transfers(layout.ownership, [[[keys[i]] for _, _, keys in x] for x in asked], rank)
        for i in (0, 1)
    ]
    sinks, halo = exchanges
    groups: list[list[Item]] = [[], [], []]
    for (segment, (lo, hi), _), first, then in zip(
        asked[rank], sinks.requests, halo.requests, strict=True
    ):
        row = segment.row + lo - segment.start
        then = tuple(Piece(x.buffer and x.buffer + len(sinks.receives), x.rows) for x in then)
        wave = 2 if any(x.buffer for x in then) else int(any(x.buffer for x in first))
        groups[wave].append(Item(slice(row, row + hi - lo), (*first, *then)))
    return HaloPlan(sinks, halo, *(calls_of(group, batch) for group in groups))


class HaloAttention(torch.autograd.Function):
    """Output and log-sum-exp of a rank's queries; gradients of fetched keys go to their owners."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        channel: Channel,
        plan: HaloPlan,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = new_like(q), new_lse(q)
        exchanges = [Exchange(channel, x, k, 2) for x in (plan.sinks, plan.halo)]
        for exchange in exchanges:
            exchange.start((k, v))
        received: list[torch.Tensor] = []
        for index, group in enumerate((plan.alone, plan.after_sinks, plan.after_halo)):
            if index:
                received += exchanges[index - 1].wait()
            for call in group:
                key, value = calls.put_together(k, v, received, call)
                calls.forward_into(out, lse, call, q, key, value, sinks, spec)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *received)
        ctx.channel, ctx.plan, ctx.spec = channel, plan, spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, *received = ctx.saved_tensors
        plan: HaloPlan = ctx.plan
        upstream = (out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        dq = new_like(q)
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        grads: list[tuple[Sequence[Piece], Sequence[torch.Tensor]]] = []

        def run(group: tuple[Call, ...]) -> None:
            for call in group:
                key, value = calls.put_together(k, v, received, call)
                part, dk, dv, share = calls.backward(call, upstream, q, key, value, sinks, ctx.spec)
                put_rows(dq, call.rows, part)
                grads.append((call.pieces, (dk, dv)))
                if dsinks is not None and share is not None:
                    dsinks.add_(share)

        exchanges = [Exchange(ctx.channel, x, k, 2) for x in (plan.sinks, plan.halo)]
        of_sinks, of_halo = exchanges
        last_sink = 1 + len(plan.sinks.receives)
        run(plan.after_halo)
        of_halo.start_return(by_buffer(grads, 2, 1 + len(received))[last_sink:])
        run(plan.after_sinks)
        of_sinks.start_return(by_buffer(grads, 2, 1 + len(received))[1:last_sink])
        run(plan.alone)
        parts = by_buffer(grads, 2, 1 + len(received))[0]
        for exchange in exchanges:
            for mine, came in zip(parts, exchange.finish_return(), strict=True):
                mine += came
        dk, dv = of_halo.total(parts)
        if sinks is not None and dsinks is not None:
            dsinks = dsinks.to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None

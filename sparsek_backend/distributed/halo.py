"""Sink-window attention over a sharded stream: each rank fetches sinks and a halo of keys.

A segment of a sequence, positions ``[lo, hi)``, meets the keys ``[0, num_sink)`` and
``[lo - W + 1, hi)``.  One call has all its queries.  Rows are few next to the work on them: they
travel before the call, their gradients after it, in fp32: keys that several segments meet have a
sum of gradients, which is rounded once.  A message that waited beside a kernel would hold
multiprocessors, and a second call for what needs no halo costs more than it hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sparsek_backend.distributed import calls
from sparsek_backend.distributed.calls import Call, Item, calls_of, with_terms
from sparsek_backend.distributed.exchange import Exchange, by_buffer
from sparsek_backend.distributed.layouts import Segment, SequenceLayout
from sparsek_backend.distributed.mesh import Channel
from sparsek_backend.distributed.rows import Range, Transfers, plan_transfers
from sparsek_kernels.common.operators import new_like, new_lse
from sparsek_kernels.common.precision import compute_dtype
from sparsek_kernels.sink_window.spec import AttentionSpec


@dataclass(frozen=True)
class HaloPlan:
    """Exchange and launches of one rank; the calls have its rows in order."""

    transfers: Transfers  # of sinks and halos
    calls: tuple[Call, ...]


def _key_ranges(segment: Segment, num_sink: int, window: int) -> list[Range]:
    """Keys that a segment's queries meet: sinks, then the halo and its own."""
    first = segment.sequence
    last_sink = min(first + num_sink, segment.stop)
    return [(first, last_sink), (max(last_sink, segment.start - window + 1), segment.stop)]


@lru_cache(maxsize=64)
def plan_halo(
    layout: SequenceLayout, rank: int, num_sink: int, window_size: int, batch: int
) -> HaloPlan:
    """The plan of one rank, from the layout alone."""
    asked = [[_key_ranges(x, num_sink, window_size) for x in own] for own in layout.segments]
    transfers = plan_transfers(layout.ownership, asked, rank)
    pairs = zip(layout.segments[rank], transfers.requests, strict=True)
    items = [Item(segment.rows, pieces) for segment, pieces in pairs]
    return HaloPlan(transfers, with_terms(calls_of(items, batch), transfers))


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
        exchange = Exchange(channel, plan.transfers, k, 2, compute_dtype(k.dtype))
        exchange.start((k, v))
        received = exchange.wait()
        keys = [calls.put_together(k, v, received, call) for call in plan.calls]
        for call, pair in zip(plan.calls, keys, strict=True):
            calls.forward_into(out, lse, call, q, *pair, sinks, spec)
        ctx.save_for_backward(q, sinks, out, lse, *(x for pair in keys for x in pair))
        ctx.exchange, ctx.plan, ctx.spec = exchange, plan, spec
        if any(ctx.needs_input_grad):
            ctx.slots = [calls.slots_of(call, k.device) for call in plan.calls]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, sinks, out, lse, *keys = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        plan: HaloPlan = ctx.plan
        upstream = (out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        inputs = zip(plan.calls, keys[::2], keys[1::2], ctx.slots, strict=True)
        found = [
            calls.backward(call, upstream, q, k, v, sinks, ctx.spec, slots)
            for call, k, v, slots in inputs
        ]
        pairs = list(zip(plan.calls, found, strict=True))
        buffers = 1 + len(plan.transfers.receives)
        own, *_ = by_buffer([(call.pieces, x.dkv) for call, x in pairs], 2, buffers)
        terms, *others = by_buffer([(call.terms.pieces, x.terms) for call, x in pairs], 2, buffers)
        exchange.start_return(others)
        dk, dv = exchange.total(own, terms)
        dq = found[0].dq if len(found) == 1 else torch.cat([x.dq for x in found], 1)
        shares = [x.dsinks for x in found if x.dsinks is not None]
        dsinks = torch.stack(shares).sum(0) if shares else None
        return dq, dk, dv, dsinks, None, None, None

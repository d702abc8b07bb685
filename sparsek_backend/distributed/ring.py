"""Dense attention over a sharded stream: every rank's keys pass every rank whose queries see them.

At step ``t`` of ``R`` rank ``r`` attends keys of rank ``r - t``, which sends only the rows that
queries of ``r`` see; the next step's keys travel meanwhile.  Outputs are merged by their
log-sum-exps in fp32 (ring attention, arXiv 2310.01889).  On the way back each step's key gradients
go straight to their owner, who adds them in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sparsek_backend.distributed import calls
from sparsek_backend.distributed.calls import Call, Item, calls_of, offsets_of
from sparsek_backend.distributed.exchange import Exchange, by_buffer
from sparsek_backend.distributed.layouts import Segment, SequenceLayout
from sparsek_backend.distributed.mesh import Channel
from sparsek_backend.distributed.rows import Piece, Range, Transfers, plan_transfers, rows_of_part
from sparsek_kernels.sink_window.spec import AttentionSpec


@dataclass(frozen=True)
class RingStep:
    """One step of one rank: an exchange of keys, then the calls over the keys received."""

    transfers: Transfers
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class RingPlan:
    """The call over a rank's own keys, and a step for every other rank."""

    own: Call
    steps: tuple[RingStep, ...]


def _seen(
    layout: SequenceLayout, rank: int, source: int, causal: bool
) -> list[tuple[list[Segment], list[Range]]]:
    """Queries of ``rank`` that see the same keys of another rank, and those keys."""
    found: list[tuple[list[Segment], list[Range]]] = []
    for segment in layout.segments[rank]:
        keys = [
            (x.start, x.stop)
            for x in layout.segments[source]
            if x.sequence == segment.sequence and (not causal or x.stop <= segment.start)
        ]
        if not keys:
            continue
        if found and found[-1][1] == keys:
            found[-1][0].append(segment)
        else:
            found.append(([segment], keys))
    return found


@lru_cache(maxsize=64)
def plan_ring(layout: SequenceLayout, rank: int, causal: bool, batch: int) -> RingPlan:
    """The plan of one rank, from the layout alone."""
    world = layout.world_size
    lengths: dict[int, int] = {}
    for x in layout.segments[rank]:
        lengths[x.sequence] = lengths.get(x.sequence, 0) + len(x)
    rows = slice(0, layout.tokens_per_rank)
    own = Call((rows,), (Piece(0, rows),))
    if len(lengths) > 1:
        offsets = offsets_of(lengths.values())
        own = Call(own.rows, own.pieces, offsets, offsets)
    steps = []
    for t in range(1, world):
        seen = [_seen(layout, r, (r - t) % world, causal) for r in range(world)]
        requests = [[keys for _, keys in of_rank] for of_rank in seen]
        transfers = plan_transfers(layout.ownership, requests, rank)
        items = [
            Item(slice(segments[0].row, segments[-1].rows.stop), pieces)
            for (segments, _), pieces in zip(seen[rank], transfers.requests, strict=True)
        ]
        steps.append(RingStep(transfers, calls_of(items, batch)))
    return RingPlan(own, tuple(steps))


class RingAttention(torch.autograd.Function):
    """Output and log-sum-exp of a rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        channel: Channel,
        plan: RingPlan,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exchanges = [Exchange(channel, step.transfers, k, 2) for step in plan.steps]
        if exchanges:
            exchanges[0].start((k, v))
        # Learned sinks are one more term of each row's denominator: the own keys' call has it.
        found, lse = calls.forward(plan.own, q, k, v, sinks, spec)
        out = found.to(lse.dtype)
        full = spec._replace(causal=False)
        for index, step in enumerate(plan.steps):
            received = exchanges[index].wait()
            if index + 1 < len(exchanges):
                exchanges[index + 1].start((k, v))
            for call in step.calls:
                key, value = calls.put_together(k, v, received, call)
                _merge(out, lse, call, *calls.forward(call, q, key, value, None, full))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.channel, ctx.plan, ctx.spec = channel, plan, spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        upstream = (out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        exchanges = [Exchange(ctx.channel, step.transfers, k, 2) for step in plan.steps]
        if exchanges:
            exchanges[0].start((k, v))
        part, both, dsinks, _ = calls.backward(plan.own, upstream, q, k, v, sinks, ctx.spec)
        dq, dkv = (x.to(lse.dtype) for x in (part, torch.stack(both)))
        full = ctx.spec._replace(causal=False)
        returning: Exchange | None = None
        for index, step in enumerate(plan.steps):
            received = exchanges[index].wait()
            if index + 1 < len(exchanges):
                exchanges[index + 1].start((k, v))
            grads = []
            for call in step.calls:
                key, value = calls.put_together(k, v, received, call)
                part, both, *_ = calls.backward(call, upstream, q, key, value, None, full)
                for rows, here in rows_of_part(call.rows):
                    dq[:, rows] += part[:, here]
                grads.append((call.pieces, both))
            if returning is not None:
                _add_parts(dkv, returning)
            returning = Exchange(ctx.channel, step.transfers, k, 2)
            returning.start_return(by_buffer(grads, 2, 1 + len(received))[1:])
        if returning is not None:
            _add_parts(dkv, returning)
        dk, dv = dkv.to(k.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None


def _merge(
    out: torch.Tensor, lse: torch.Tensor, call: Call, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add a partial output to ``out`` and ``lse``, weighted by the share of its keys."""
    for rows, here in rows_of_part(call.rows):
        new = torch.logaddexp(lse[..., rows], part_lse[..., here])
        weight = (part_lse[..., here] - new).exp().nan_to_num(0.0)  # no key at all: nothing
        out[:, rows].lerp_(part[:, here].to(out.dtype), weight.transpose(1, 2)[..., None])
        lse[..., rows] = new


def _add_parts(total: torch.Tensor, returning: Exchange) -> None:
    for of_tensor, parts in zip(total, returning.finish_return(), strict=True):
        for rows, part in parts:
            of_tensor[:, rows] += part

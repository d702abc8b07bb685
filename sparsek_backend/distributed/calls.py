"""Calls of the sink-window kernels on parts of a rank's queries and the keys that they meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from sparsek_backend.distributed.rows import (
    Piece,
    Range,
    Transfers,
    joined,
    joined_pieces,
    met_twice,
    shared,
    take,
    take_rows,
)
from sparsek_kernels.sink_window.ops import (
    sink_flash_bwd,
    sink_flash_bwd_terms,
    sink_flash_fwd,
    sink_flash_fwd_out,
)
from sparsek_kernels.sink_window.spec import AttentionSpec


class Item(NamedTuple):
    """Queries of one sequence and the keys that they meet, the queries last."""

    rows: slice
    pieces: tuple[Piece, ...]


class Terms(NamedTuple):
    """Keys of a call that other calls or ranks meet too: their gradients are terms of sums."""

    pieces: tuple[Piece, ...] = ()  # where they lie
    rows: tuple[Range, ...] = ()  # of the call's keys


NO_TERMS = Terms()


@dataclass(frozen=True)
class Call:
    """One launch."""

    rows: tuple[slice, ...]  # the rank's rows that are its queries
    pieces: tuple[Piece, ...]  # where its keys lie
    # offsets of the items' queries, where there are several items
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None  # offsets of their keys
    terms: Terms = NO_TERMS


def calls_of(items: Sequence[Item], batch: int) -> tuple[Call, ...]:
    """One call for all items, packed; or one for each where a batch forbids packing."""
    if batch > 1 or len(items) < 2:
        return tuple(Call((item.rows,), item.pieces) for item in items)
    return (
        Call(
            joined(item.rows for item in items),
            joined_pieces(piece for item in items for piece in item.pieces),
            offsets_of(item.rows.stop - item.rows.start for item in items),
            offsets_of(sum(x.rows.stop - x.rows.start for x in item.pieces) for item in items),
        ),
    )


def with_terms(calls: Sequence[Call], transfers: Transfers) -> tuple[Call, ...]:
    """Calls over own and fetched keys, with their :class:`Terms`."""
    rows = [piece.rows for call in calls for piece in call.pieces if piece.buffer == 0]
    own = met_twice(rows + [x for _, sent in transfers.sends for x in sent])
    found = [list(shared(call.pieces, own)) for call in calls]
    terms = [Terms(tuple(x for x, _ in pairs), tuple(x for _, x in pairs)) for pairs in found]
    return tuple(replace(call, terms=x) for call, x in zip(calls, terms, strict=True))


def offsets_of(lengths: Iterable[int]) -> tuple[int, ...]:
    """Offsets of packed sequences of these lengths."""
    return tuple(accumulate(lengths, initial=0))


@lru_cache(maxsize=256)
def on_device(offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Offsets as an int32 tensor, made once."""
    with torch.inference_mode(False):
        return torch.tensor(offsets, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _slots(rows: tuple[Range, ...], num_keys: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        slots, first = torch.full((num_keys,), -1, dtype=torch.int32, device="cpu"), 0
        for lo, hi in rows:
            slots[lo:hi] = torch.arange(first, first + hi - lo, device="cpu")
            first += hi - lo
        return slots.to(device)


def slots_of(call: Call, device: torch.device) -> torch.Tensor | None:
    """The place of each of a call's keys among its terms, ``[M]`` int32, -1 for none."""
    if not call.terms.rows:
        return None
    num_keys = sum(piece.rows.stop - piece.rows.start for piece in call.pieces)
    return _slots(call.terms.rows, num_keys, device)


def _cu_seqlens(call: Call, device: torch.device) -> list[torch.Tensor | None]:
    both = (call.cu_seqlens_q, call.cu_seqlens_k)
    return [None if x is None else on_device(x, device) for x in both]


def forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the call's queries, for keys ``k`` and ``v`` put together."""
    found: tuple[torch.Tensor, torch.Tensor] = sink_flash_fwd(
        take_rows(q, call.rows), k, v, sinks, *_cu_seqlens(call, q.device), *spec
    )
    return found


def forward_into(
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    spec: AttentionSpec,
) -> None:
    """:func:`forward`, written to ``out [B, N, Hq, D]`` and ``lse``; the rows are one slice."""
    (rows,) = call.rows
    lse[..., rows] = sink_flash_fwd_out(
        out[:, rows], q[:, rows], k, v, sinks, *_cu_seqlens(call, q.device), *spec
    )


class Gradients(NamedTuple):
    """Of a call."""

    dq: torch.Tensor
    dkv: tuple[torch.Tensor, torch.Tensor]  # of keys and of values
    dsinks: torch.Tensor | None
    terms: tuple[torch.Tensor, ...]  # rows of ``dkv`` unrounded, in the order of the call's terms


def backward(
    call: Call,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    spec: AttentionSpec,
    slots: torch.Tensor | None = None,
) -> Gradients:
    """Gradients of the call's queries, keys and values, and its share of the gradient of sinks.

    Args:
        saved: ``out``, ``lse``, ``dout`` and ``dlse`` of all the rank's rows, over all keys: the
            probabilities and row sums follow from them, whichever keys this call has.
        slots: :func:`slots_of` the call, for its terms.
    """
    out, lse, dout, dlse = saved
    by_row = [None if x is None else take_rows(x.transpose(1, 2), call.rows) for x in (lse, dlse)]
    part_lse, part_dlse = (None if x is None else x.transpose(1, 2).contiguous() for x in by_row)
    inputs = (
        take_rows(dout, call.rows),
        part_dlse,
        take_rows(q, call.rows),
        k,
        v,
        take_rows(out, call.rows),
        part_lse,
        sinks,
        *_cu_seqlens(call, q.device),
        *spec,
    )
    terms: tuple[torch.Tensor, ...] = ()
    if slots is None:
        dq, dk, dv, dsinks = sink_flash_bwd(*inputs)
    else:
        count = sum(hi - lo for lo, hi in call.terms.rows)
        dq, dk, dv, dsinks, both = sink_flash_bwd_terms(slots, count, *inputs)
        terms = both.unbind()
    return Gradients(dq, (dk, dv), None if sinks is None else dsinks, terms)


def put_together(
    k: torch.Tensor, v: torch.Tensor, received: Sequence[Sequence[torch.Tensor]], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a call, from the rank's own and those that it received."""
    buffers = ([x, *(there[i] for there in received)] for i, x in enumerate((k, v)))
    key, value = (take(x, call.pieces) for x in buffers)
    return key, value

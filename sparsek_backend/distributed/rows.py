"""Which rows each rank fetches from which other; every rank works all of it out by itself.

Rows are counted through a stream, of tokens or of compressed blocks.  A rank asks for ranges of it;
each is put together from *pieces*: own rows, and rows that their owners send.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

import torch

Range = tuple[int, int]
Part = tuple[slice, torch.Tensor]  # rows of a tensor, and what lies or is added there


class Stretch(NamedTuple):
    """Consecutive rows of the stream in one buffer, from row ``row`` of it on."""

    start: int
    stop: int
    row: int


class Piece(NamedTuple):
    """Rows of a buffer: buffer 0 is the rank's own, the others come from its sources in order."""

    buffer: int
    rows: slice


def stacked(ranges: Iterable[Range]) -> tuple[Stretch, ...]:
    """Ranges of the stream that lie one after another in a buffer."""
    stretches, row = [], 0
    for start, stop in ranges:
        stretches.append(Stretch(start, stop, row))
        row += stop - start
    return tuple(stretches)


@dataclass(frozen=True)
class Ownership:
    """Who holds the rows of a stream: the stretches of each rank, ascending."""

    stretches: tuple[tuple[Stretch, ...], ...]

    @cached_property
    def _by_start(self) -> tuple[list[int], list[tuple[Stretch, int]]]:
        found = [(x, rank) for rank, own in enumerate(self.stretches) for x in own]
        found.sort(key=lambda pair: pair[0].start)
        return [x.start for x, _ in found], found

    def owners(self, wanted: Range) -> list[tuple[int, Stretch]]:
        """The ranks that hold a range, with the rows of each, ascending."""
        starts, found = self._by_start
        lo, hi = wanted
        index = max(bisect_right(starts, lo) - 1, 0)
        parts: list[tuple[int, Stretch]] = []
        for stretch, rank in islice(found, index, None):
            if stretch.start >= hi:
                break
            first, last = max(lo, stretch.start), min(hi, stretch.stop)
            if first < last:
                parts.append((rank, Stretch(first, last, stretch.row + first - stretch.start)))
        return parts


def _union(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for lo, hi in sorted(x for x in ranges if x[0] < x[1]):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def _from_others(
    owners: Ownership, requests: Sequence[Sequence[Range]], rank: int
) -> dict[int, list[Stretch]]:
    """Rows that ``rank`` fetches from each other rank, every row once."""
    found: dict[int, list[Stretch]] = {}
    for wanted in _union(x for request in requests for x in request):
        for owner, stretch in owners.owners(wanted):
            if owner != rank:
                found.setdefault(owner, []).append(stretch)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Transfers:
    """Rows that one rank sends and receives, and the lists that it makes of them."""

    # ranks of the mesh and the own rows that each gets
    sends: tuple[tuple[int, tuple[slice, ...]], ...]
    receives: tuple[tuple[int, int], ...]  # ranks of the mesh and how many rows each sends
    # the pieces of each requested list of ranges, in its order
    requests: tuple[tuple[Piece, ...], ...]


def plan_transfers(
    owners: Ownership, requests: Sequence[Sequence[Sequence[Range]]], rank: int
) -> Transfers:
    """The transfers of ``rank``, where ``requests[r]`` are the lists of ranges that ``r`` asks."""
    sends = []
    for other in range(len(requests)):
        if other != rank:
            out = _from_others(owners, requests[other], other).get(rank, [])
            if out:
                rows = tuple(slice(x.row, x.row + x.stop - x.start) for x in out)
                sends.append((other, joined(rows)))
    incoming = _from_others(owners, requests[rank], rank)
    receives = tuple((s, sum(x.stop - x.start for x in parts)) for s, parts in incoming.items())
    received = [stacked((x.start, x.stop) for x in parts) for parts in incoming.values()]
    buffers = Ownership((owners.stretches[rank], *received))
    found = tuple(
        joined_pieces(
            Piece(buffer, slice(x.row, x.row + x.stop - x.start))
            for wanted in request
            for buffer, x in buffers.owners(wanted)
        )
        for request in requests[rank]
    )
    return Transfers(tuple(sends), receives, found)


def joined(rows: Iterable[slice]) -> tuple[slice, ...]:
    """The same rows in as few slices as can be."""
    return tuple(x.rows for x in joined_pieces([Piece(0, x) for x in rows]))


def joined_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same rows in as few pieces as can be."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].buffer == piece.buffer and found[-1].rows.stop == piece.rows.start:
            found[-1] = Piece(piece.buffer, slice(found[-1].rows.start, piece.rows.stop))
        elif piece.rows.start < piece.rows.stop:
            found.append(piece)
    return tuple(found)


def take(buffers: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> torch.Tensor:
    """Pieces one after another, ``[B, rows, H, D]``; a view where they are one."""
    parts = [buffers[piece.buffer][:, piece.rows] for piece in pieces]
    if not parts:
        return buffers[0][:, :0]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def take_rows(x: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """Rows of one tensor one after another; a view where they are one slice."""
    return take([x], [Piece(0, part) for part in rows])


def met_twice(rows: Iterable[slice]) -> tuple[slice, ...]:
    """Rows that more than one of these have."""
    edges = sorted(edge for x in rows for edge in ((x.start, 1), (x.stop, -1)))
    found, depth = [], 0
    for (lo, step), (hi, _) in pairwise(edges):
        depth += step
        if depth > 1:
            found.append(slice(lo, hi))
    return joined(found)


def shared(pieces: Sequence[Piece], own: Sequence[slice]) -> Iterator[tuple[Piece, Range]]:
    """What of pieces is fetched or in these own rows, and its rows in what :func:`take` takes."""
    for piece, (rows, here) in zip(pieces, rows_of_part(x.rows for x in pieces), strict=True):
        for x in own if piece.buffer == 0 else [rows]:
            lo, hi = max(rows.start, x.start), min(rows.stop, x.stop)
            if lo < hi:
                first = here.start + lo - rows.start
                yield Piece(piece.buffer, slice(lo, hi)), (first, first + hi - lo)


def _stretches(
    parts: Sequence[Part], edges: Iterable[int] = ()
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Rows between edges of parts, these ``edges`` among them, and what the parts have there."""
    parts = sorted(parts, key=lambda part: part[0].start)
    edges = set(edges)
    edges.update(edge for rows, _ in parts for edge in (rows.start, rows.stop))
    active: list[Part] = []
    next_part = 0
    for lo, hi in pairwise(sorted(edges)):
        while next_part < len(parts) and parts[next_part][0].start <= lo:
            active.append(parts[next_part])
            next_part += 1
        active = [part for part in active if part[0].stop > lo]
        yield slice(lo, hi), [x[:, lo - rows.start : hi - rows.start] for rows, x in active]


def _put_sum(total: torch.Tensor, here: list[torch.Tensor]) -> None:
    if len(here) == 1:
        total.copy_(here[0])  # nothing is done where it lies there
    elif total.dtype == here[0].dtype:
        torch.sum(torch.stack(here), 0, out=total)
    else:
        total.copy_(torch.stack(here).sum(0))


def summed(total: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """``total [B, rows, H, D]``, filled with the sum of its parts, in fp32 where several meet.

    Args:
        total: overwritten; zeros where no part is.  It may be a part that has all its rows.
        parts: rows of ``total``, and what is added there ``[B, their number, H, D]``.
    """
    for rows, here in _stretches(parts, (0, total.shape[1])):
        if here:
            _put_sum(total[:, rows], here)
        else:
            total[:, rows] = 0
    return total


def put_sums(total: torch.Tensor, parts: Sequence[Part]) -> None:
    """Fill the rows of ``total [B, rows, H, D]`` that have parts with their sum, rounded once.

    Args:
        parts: as of :func:`summed`, all in one dtype, of no less precision than ``total``.
    """
    for rows, here in _stretches(parts):
        if here:
            _put_sum(total[:, rows], here)


def rows_of_part(rows: Iterable[slice]) -> Iterator[tuple[slice, slice]]:
    """Each of ``rows``, and where it lies in what :func:`take_rows` takes of them."""
    row = 0
    for where in rows:
        here = slice(row, row + where.stop - where.start)
        yield where, here
        row = here.stop


def spread(pieces: Sequence[Piece], x: torch.Tensor) -> list[tuple[int, Part]]:
    """Inverse of :func:`take`: the buffer of each piece, its rows and its part of ``x``."""
    parts = zip(pieces, rows_of_part(piece.rows for piece in pieces), strict=True)
    return [(piece.buffer, (rows, x[:, here])) for piece, (rows, here) in parts]

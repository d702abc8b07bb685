"""Native sparse attention over a sharded stream: what is exchanged, and the calls of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from sparsek_backend.distributed.calls import offsets_of
from sparsek_backend.distributed.layouts import Segment, SequenceLayout
from sparsek_backend.distributed.rows import Ownership, Range, Stretch, Transfers, plan_transfers
from sparsek_kernels.nsa.spec import NSASpec


@dataclass(frozen=True)
class Group:
    """Segments whose queries are one call of the kernels."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> tuple[slice, ...]:
        """The rank's rows that are its queries."""
        return tuple(x.rows for x in self.segments)

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Offsets of several sequences."""
        return offsets_of(map(len, self.segments)) if len(self.segments) > 1 else None


@dataclass(frozen=True)
class NSAPlan:
    """Exchanges and launches of one rank; exchanges but ``halo`` have a request for each group."""

    halo: Transfers  # the exchange of the tokens that this rank's blocks are made of
    # of each segment with new blocks, the position of the first and how many
    blocks: tuple[tuple[int, int], ...]
    compressed: Transfers  # the exchange of compressed blocks
    selected: Transfers  # the exchange of the selected branch's keys
    sliding: Transfers  # the exchange of the window's keys
    groups: tuple[Group, ...]  # the calls


def _groups(segments: tuple[Segment, ...], batch: int) -> list[list[Segment]]:
    """Segments that start their sequences in one packed call, each other one in its own.

    A packed call has the keys of its queries alone; a single sequence may have more before them.
    """
    whole = [x for x in segments if x.start == x.sequence]
    cut = [[x] for x in segments if x.start > x.sequence]
    return ([[x] for x in whole] if batch > 1 else [whole] if whole else []) + cut


@lru_cache(maxsize=64)
def plan_nsa(
    layout: SequenceLayout, rank: int, spec: NSASpec, window_size: int, batch: int
) -> NSAPlan:
    """The plan of one rank, from the layout alone."""
    first_block, total = {}, 0
    for lo, hi in pairwise(layout.edges):
        if lo < hi:
            first_block[lo] = total
            total += spec.num_compressed(hi - lo)

    tokens: list[list[list[Range]]] = []  # that each rank's blocks are made of
    held: list[tuple[Stretch, ...]] = []
    made: list[list[tuple[int, int]]] = []
    for segments in layout.segments:
        ranges, own, new, row = [], [], [], 0
        for x in segments:
            lo, hi = (spec.num_compressed(edge - x.sequence) for edge in (x.start, x.stop))
            if lo < hi:  # blocks that end in the segment
                first = lo * spec.cmp_stride
                last = (hi - 1) * spec.cmp_stride + spec.cmp_block_size
                ranges.append((x.sequence + first, x.sequence + last))
                start = first_block[x.sequence]
                own.append(Stretch(start + lo, start + hi, row))
                new.append((first, hi - lo))
                row += hi - lo
        tokens.append([ranges])
        held.append(tuple(own))
        made.append(new)
    groups = [_groups(segments, batch) for segments in layout.segments]

    def exchange(owners: Ownership, keys: Callable[[Segment], Range]) -> Transfers:
        asked = [[[keys(x) for x in group] for group in of_rank] for of_rank in groups]
        return plan_transfers(owners, asked, rank)

    def compressed(x: Segment) -> Range:
        start = first_block[x.sequence]
        return start, start + spec.num_compressed(x.stop - x.sequence)

    return NSAPlan(
        plan_transfers(layout.ownership, tokens, rank),
        tuple(made[rank]),
        exchange(Ownership(tuple(held)), compressed),
        exchange(layout.ownership, lambda x: (x.sequence, x.stop)),
        exchange(layout.ownership, lambda x: (max(x.sequence, x.start - window_size + 1), x.stop)),
        tuple(Group(tuple(group)) for group in groups[rank]),
    )

"""Which rank holds which tokens of a sequence, or of packed sequences, and in which order.

Tokens are counted through the whole *stream*: one sequence, or packed sequences one after another.
The stream is cut into equal chunks of consecutive tokens, wherever the cuts fall.

``contiguous``: one chunk a rank, in order.  ``zigzag``: two chunks a rank, ``r`` and
``2 R - 1 - r`` of ``2 R``, which gives every rank the same causal work.  Any other deal names the
rank of each chunk.  A rank's rows are its chunks in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed.mesh import channel_of, check_mesh
from sparsek_backend.distributed.rows import Ownership, stacked
from sparsek_kernels.checks import check_int

Order = Literal["contiguous", "zigzag"] | tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence on one rank."""

    sequence: int  # first token of the sequence in the stream
    start: int  # first token in the stream
    stop: int  # token past the last one
    row: int  # row of the rank's shard that holds the first token

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Rows of the rank's shard."""
        return slice(self.row, self.row + len(self))


@dataclass(frozen=True)
class SequenceLayout:
    """How a stream of tokens is spread over the ranks of a mesh.

    Args:
        num_tokens: tokens of the whole stream; a multiple of the number of chunks.
        world_size: ranks.
        order: ``contiguous`` (a chunk a rank), ``zigzag`` (two chunks a rank) or the rank of each
            chunk, of which every rank has as many.
        cu_seqlens: offsets of packed sequences in the stream, from 0 to ``num_tokens``; one
            sequence when ``None``.

    Raises:
        TypeError: a size that is no integer.
        ValueError: tokens that the ranks cannot share equally, an unknown order, or offsets that
            do not ascend from 0 to ``num_tokens``.
    """

    num_tokens: int
    world_size: int
    order: Order = "contiguous"
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_int("num_tokens", self.num_tokens, 1)
        check_int("world_size", self.world_size, 1)
        if isinstance(self.order, list):
            object.__setattr__(self, "order", tuple(self.order))
        each = {self.chunk_ranks.count(rank) for rank in range(self.world_size)}
        if len(each) > 1 or each == {0} or set(self.chunk_ranks) - set(range(self.world_size)):
            raise ValueError(
                f"order: expected 'contiguous', 'zigzag' or as many chunks of each of "
                f"{self.world_size} ranks, got {self.order!r}"
            )
        if self.num_tokens % self.num_chunks:
            raise ValueError(
                f"num_tokens: expected a multiple of {self.num_chunks} for {self.world_size} ranks "
                f"in {self.order} order, got {self.num_tokens}; pad the stream"
            )
        if self.cu_seqlens is None:
            return
        given: Sequence[int] | torch.Tensor = self.cu_seqlens
        edges = tuple(given.tolist() if isinstance(given, torch.Tensor) else given)
        ascending = all(lo <= hi for lo, hi in pairwise(edges))
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != self.num_tokens or not ascending:
            raise ValueError(
                f"cu_seqlens: expected non-decreasing offsets from 0 to num_tokens="
                f"{self.num_tokens}, got {list(edges)}"
            )
        object.__setattr__(self, "cu_seqlens", edges)

    @property
    def chunk_ranks(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        ranks = tuple(range(self.world_size))
        if isinstance(self.order, tuple):
            return self.order
        return {"contiguous": ranks, "zigzag": ranks + ranks[::-1]}.get(self.order, ())

    @property
    def num_chunks(self) -> int:
        """Chunks that the stream is cut into."""
        return len(self.chunk_ranks)

    @property
    def tokens_per_rank(self) -> int:
        """Rows of every rank's shard."""
        return self.num_tokens // self.world_size

    @property
    def packed(self) -> bool:
        """Whether the stream holds several sequences."""
        return self.cu_seqlens is not None and len(self.cu_seqlens) > 2

    @property
    def edges(self) -> tuple[int, ...]:
        """Offsets of the sequences, of one sequence too."""
        return (0, self.num_tokens) if self.cu_seqlens is None else self.cu_seqlens

    @cached_property
    def chunks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Token ranges of each rank, ascending; chunks that touch are one range."""
        size = self.num_tokens // self.num_chunks
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.world_size)]
        for chunk, rank in enumerate(self.chunk_ranks):
            own, start = found[rank], chunk * size
            if own and own[-1][1] == start:
                start = own.pop()[0]
            own.append((start, (chunk + 1) * size))
        return tuple(map(tuple, found))

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each rank, in the order of its rows."""
        found: list[tuple[Segment, ...]] = []
        for ranges in self.chunks:
            row, segments = 0, []
            for start, stop in ranges:
                for lo, hi in pairwise(self.edges):
                    first, last = max(lo, start), min(hi, stop)
                    if first < last:
                        segments.append(Segment(lo, first, last, row + first - start))
                row += stop - start
            found.append(tuple(segments))
        return tuple(found)

    @cached_property
    def ownership(self) -> Ownership:
        """Who holds which tokens."""
        return Ownership(tuple(map(stacked, self.chunks)))

    def token_indices(self, rank: int) -> torch.Tensor:
        """Tokens of the stream that ``rank`` holds, ``[tokens_per_rank]`` int64 on the CPU."""
        return torch.cat([torch.arange(lo, hi, device="cpu") for lo, hi in self.chunks[rank]])

    def sequence_ids(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Which sequence each of a rank's tokens belongs to, ``[tokens_per_rank]`` int64."""
        edges = torch.tensor(self.edges[1:], device="cpu")
        return torch.searchsorted(edges, self.token_indices(rank), right=True).to(device)

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Position of each of a rank's tokens in its sequence, ``[tokens_per_rank]`` int64."""
        parts = [
            torch.arange(x.start - x.sequence, x.stop - x.sequence, device=device)
            for x in self.segments[rank]
        ]
        return torch.cat(parts)


def check_layout(layout: SequenceLayout, mesh: DeviceMesh) -> None:
    """Check that a layout is for as many ranks as a mesh has."""
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout: expected a SequenceLayout, got {type(layout).__name__}")
    if mesh.size() != layout.world_size:
        raise ValueError(
            f"mesh: expected {layout.world_size} ranks as in the layout, got {mesh.size()}"
        )


def check_shard(name: str, x: torch.Tensor, layout: SequenceLayout) -> None:
    """Check that a tensor ``[B, n, ...]`` is a shard of a layout."""
    if x.shape[1] != layout.tokens_per_rank:
        raise ValueError(
            f"{name}: expected {layout.tokens_per_rank} tokens, the layout's shard, "
            f"got {x.shape[1]}"
        )
    if layout.packed and x.shape[0] != 1:
        raise ValueError(f"{name}: expected batch size 1 with packed sequences, got {x.shape[0]}")


def shard(x: torch.Tensor, mesh: DeviceMesh, layout: SequenceLayout, dim: int = 1) -> torch.Tensor:
    """This rank's rows of a tensor that every rank holds whole; differentiable.

    Args:
        x: ``num_tokens`` along ``dim``.
        mesh: one dimension, the ranks of ``layout``.
        layout: who holds what.
        dim: the token dimension.

    Raises:
        ValueError: another number of tokens, or a mesh of another size.
    """
    check_mesh(mesh)
    check_layout(layout, mesh)
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != layout.num_tokens:
        raise ValueError(
            f"x: expected {layout.num_tokens} tokens in dimension {dim}, got shape {list(x.shape)}"
        )
    ranges = layout.chunks[mesh.get_local_rank()]
    parts = [x.narrow(dim, lo, hi - lo) for lo, hi in ranges]
    return torch.cat(parts, dim)


@torch.no_grad()
def unshard(
    x: torch.Tensor, mesh: DeviceMesh, layout: SequenceLayout, dim: int = 1
) -> torch.Tensor:
    """The whole tensor on every rank, in the order of the stream; no gradient passes.

    Args:
        x: this rank's shard, ``tokens_per_rank`` along ``dim``.
        mesh: one dimension, the ranks of ``layout``.
        layout: who holds what.
        dim: the token dimension.

    Raises:
        ValueError: on every rank, where one has another shape; a mesh of another size.
    """
    channel = channel_of(mesh)
    with channel.agreed() as facts:
        check_layout(layout, mesh)
        facts.update(x=(tuple(x.shape), str(x.dtype)), dim=dim, layout=layout)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != layout.tokens_per_rank:
            raise ValueError(
                f"x: expected {layout.tokens_per_rank} tokens in dimension {dim}, "
                f"got shape {list(x.shape)}"
            )
    mine = x.detach().contiguous()
    shards = [torch.empty_like(mine) for _ in range(channel.size)]
    with channel.watched():  # as bytes: gloo does not know all dtypes
        sent, *whole = (y.view(-1).view(torch.uint8) for y in (mine, *shards))
        dist.all_gather(whole, sent, group=channel.group)
    parts = []
    for part, ranges in zip(shards, layout.chunks, strict=True):
        sizes = [hi - lo for lo, hi in ranges]
        parts += [(lo, y) for (lo, _), y in zip(ranges, part.split(sizes, dim), strict=True)]
    return torch.cat([y for _, y in sorted(parts, key=lambda found: found[0])], dim)

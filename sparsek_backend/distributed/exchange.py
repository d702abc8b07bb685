"""Rows that travel between ranks, point to point, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from sparsek_backend.distributed.mesh import Channel
from sparsek_backend.distributed.rows import (
    Part,
    Piece,
    Transfers,
    put_sums,
    spread,
    summed,
    take,
    take_rows,
)

TensorParts = list[list[Part]]  # of each tensor
Messages = list[tuple[int, list[torch.Tensor]]]  # of each peer, by rank of the mesh


class Exchange:
    """Rows of some tensors of one shape, sent to who needs them; later their gradients back.

    A message is one tensor's rows, without a copy where they lie together.  What messages read and
    write lives until they are awaited.

    Args:
        like: one of the tensors, ``[B, rows, H, D]``.
        gradients: the dtype in which gradients travel, that of the tensors by default.
    """

    def __init__(
        self,
        channel: Channel,
        transfers: Transfers,
        like: torch.Tensor,
        count: int,
        gradients: torch.dtype | None = None,
    ) -> None:
        self._channel, self.transfers = channel, transfers
        self._count, self._shape = count, like.shape
        self._dtype, self._device = like.dtype, like.device
        self._gradients = gradients or like.dtype
        self.tensors: Sequence[torch.Tensor] = []  # what a fetch puts together rows of
        self.own: TensorParts = []  # gradients of the own rows that this rank asked for

    def _buffer(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        batch, _, *rest = self._shape
        return torch.empty((batch, rows, *rest), dtype=dtype, device=self._device)

    def _buffers(self, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [self._buffer(rows, dtype) for _ in range(self._count)]

    def _begin(self, sends: Messages, receives: Messages) -> None:
        group, peers = self._channel.group, self._channel.peers
        ops = [dist.P2POp(dist.isend, x, peers[rank], group) for rank, xs in sends for x in xs]
        ops += [dist.P2POp(dist.irecv, x, peers[rank], group) for rank, xs in receives for x in xs]
        with self._channel.watched():
            self._works = dist.batch_isend_irecv(ops) if ops else []
        self._sent, self._received = sends, [xs for _, xs in receives]

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send rows of the tensors, which nothing may change before :meth:`wait`."""
        sends = [
            (rank, [take_rows(x, rows).contiguous() for x in tensors])
            for rank, rows in self.transfers.sends
        ]
        receives = [
            (rank, self._buffers(count, self._dtype)) for rank, count in self.transfers.receives
        ]
        self._begin(sends, receives)

    def wait(self) -> list[list[torch.Tensor]]:
        """What was received, of each source ``[B, rows, H, D]`` of each tensor.

        Waits until it is there (on a GPU, the current stream waits).
        """
        # Messages of gloo know only the timeout that their group began with.
        limit = (self._channel.timeout,) if self._device.type == "cpu" else ()
        with self._channel.watched():
            for work in self._works:
                work.wait(*limit)
        received, self._works, self._sent, self._received = self._received, [], [], []
        return received

    def start_return(self, parts: Sequence[TensorParts]) -> None:
        """Send gradients to the owners; ``parts`` has the gradients of each source's rows."""
        sends = [
            (rank, [self._sum(found, count, self._gradients).contiguous() for found in of_source])
            for (rank, count), of_source in zip(self.transfers.receives, parts, strict=True)
        ]
        receives = [
            (rank, self._buffers(sum(x.stop - x.start for x in rows), self._gradients))
            for rank, rows in self.transfers.sends
        ]
        self._begin(sends, receives)

    def finish_return(self) -> TensorParts:
        """Gradients that came back for this rank's own rows."""
        found: TensorParts = [[] for _ in range(self._count)]
        for (_, rows), came in zip(self.transfers.sends, self.wait(), strict=True):
            pieces = [Piece(0, x) for x in rows]
            for parts, grad in zip(found, came, strict=True):
                parts += [part for _, part in spread(pieces, grad)]
        return found

    def total(self, own: TensorParts, terms: TensorParts | None = None) -> list[torch.Tensor]:
        """Gradients of each tensor: own parts and those that came back, fp32 where several meet.

        Args:
            own: this rank's parts.
            terms: the parts of rows that have several, in the dtype in which gradients travel.
                They are summed in place of ``own``'s, and each sum is rounded once.  A part of
                ``own`` may then be overwritten.
        """
        came, rows = self.finish_return(), self._shape[1]
        if terms is None:
            pairs = zip(own, came, strict=True)
            return [self._sum(mine + theirs, rows, self._dtype) for mine, theirs in pairs]
        totals = [self._sum(mine, rows, self._dtype, in_place=True) for mine in own]
        for total, mine, theirs in zip(totals, terms, came, strict=True):
            put_sums(total, mine + theirs)
        return totals

    def _sum(
        self, parts: list[Part], rows: int, dtype: torch.dtype, *, in_place: bool = False
    ) -> torch.Tensor:
        """``in_place``: a part that has every row may be overwritten by the sum."""
        whole = next((x for _, x in parts if x.shape[1] == rows), None)
        if whole is not None and len(parts) == 1:
            return whole
        if whole is None or not in_place:
            whole = self._buffer(rows, dtype)
        return summed(whole, parts)


def by_buffer(
    grads: Sequence[tuple[Sequence[Piece], Sequence[torch.Tensor]]], count: int, buffers: int
) -> list[TensorParts]:
    """Gradients of pieces, sorted by the buffer and the tensor that they belong to."""
    found: list[TensorParts] = [[[] for _ in range(count)] for _ in range(buffers)]
    for pieces, of_tensors in grads:
        for index, grad in enumerate(of_tensors):
            for buffer, part in spread(pieces, grad):
                found[buffer][index].append(part)
    return found


class _Start(torch.autograd.Function):
    """Send rows; on the way back, wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.tensors = [x.detach() for x in tensors]
        exchange.start(exchange.tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        exchange: Exchange = ctx.exchange
        own, exchange.own = exchange.own, []
        return (None, *exchange.total(own))


class _Finish(torch.autograd.Function):
    """Wait for rows and put the requests together; on the way back, send their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, handle: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.save_for_backward(handle)
        received, tensors = exchange.wait(), exchange.tensors
        exchange.tensors = []
        buffers = [[x, *(there[i] for there in received)] for i, x in enumerate(tensors)]
        return tuple(take(x, pieces) for pieces in exchange.transfers.requests for x in buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange: Exchange = ctx.exchange
        requests = exchange.transfers.requests
        count = len(grads) // len(requests)
        found = by_buffer(
            [(x, grads[i * count : (i + 1) * count]) for i, x in enumerate(requests)],
            count,
            1 + len(exchange.transfers.receives),
        )
        exchange.own = found[0]
        exchange.start_return(found[1:])
        return None, torch.zeros_like(ctx.saved_tensors[0])


class Fetch:
    """A differentiable exchange: it begins here, :meth:`wait` gives what was asked for.

    Gradients set off as soon as they are known, and are awaited where the exchange began: what was
    computed between start and wait has its backward pass while they travel.

    Args:
        tensors: ``[B, rows, H, D]`` each, of one shape, dtype and device.
    """

    def __init__(
        self, channel: Channel, transfers: Transfers, tensors: Sequence[torch.Tensor]
    ) -> None:
        self._exchange = Exchange(channel, transfers, tensors[0], len(tensors))
        self._count = len(tensors)
        self._handle = _Start.apply(self._exchange, *tensors)  # type: ignore[no-untyped-call]

    def wait(self) -> list[tuple[torch.Tensor, ...]]:
        """For each request, its rows of every tensor."""
        found = _Finish.apply(self._exchange, self._handle)  # type: ignore[no-untyped-call]
        return [tuple(found[i : i + self._count]) for i in range(0, len(found), self._count)]

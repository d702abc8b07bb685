"""Ranks that hold the pages of sequences between them: threads, and the pages that each has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier, Lock
from typing import TypeVar

import torch

from sparsek_kernels.paged import PagedBatch
from sparsek_kernels.paged.operands import Ranks
from tests.processes import SECONDS

_Result = TypeVar("_Result")


class Exchange:
    """Threads in place of ranks, of which one runs at a time: what each brings, all of them get."""

    def __init__(self, ranks: int) -> None:
        self.brought: list[torch.Tensor | None] = [None] * ranks
        self.barrier, self.turn = Barrier(ranks, timeout=SECONDS), Lock()
        self.calls = 0

    def gather(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        assert values.is_contiguous()
        self.brought[rank] = values.clone()  # ranks of one process share the kernels' scratch
        self.turn.release()
        try:
            self.barrier.wait()
            found = torch.stack([value for value in self.brought if value is not None])
            self.calls += rank == 0
            self.barrier.wait()
        finally:
            self.turn.acquire()
        return found


@dataclass
class OneOfRanks:
    """What one of the ranks exchanges by."""

    exchange: Exchange
    rank: int

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange.gather(self.rank, x)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x).amax(0)


def on_ranks(ranks: int, work: Callable[[int, Ranks], _Result]) -> tuple[list[_Result], int]:
    """What ``work(rank, ranks)`` returns on every rank, and how often they exchanged something."""
    exchange = Exchange(ranks)

    def one(rank: int) -> _Result:
        with exchange.turn:
            try:
                return work(rank, OneOfRanks(exchange, rank))
            except BaseException:
                exchange.barrier.abort()
                raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks))), exchange.calls


def own_scratch(device: torch.device, _name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """In place of ``workspace``: elsewhere, ranks are processes of their own."""
    return torch.full((numel,), 7, device=device, dtype=dtype)


def held_pages(
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: PagedBatch,
    rank: int,
    ranks: int,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], PagedBatch]:
    """K, V, summaries and a batch with every ``ranks``-th page of its sequences, others poison."""
    k_cache, v_cache, k_summary = caches
    table = batch.block_table.clone()
    logical = torch.arange(table.shape[1], device=table.device)
    others = logical % ranks != rank
    used = logical * k_cache.shape[2] < batch.seq_lens[:, None]
    foreign = table[used & others].long()
    table[:, others] = -1
    assert foreign.unique().numel() == foreign.numel() < k_cache.shape[0]
    k_cache, v_cache, k_summary = k_cache.clone(), v_cache.clone(), k_summary.clone()
    k_cache[foreign], v_cache[foreign] = float("nan"), float("nan")
    k_summary[foreign] = 255  # in a record, NaN
    return (k_cache, v_cache, k_summary), replace(batch, block_table=table, _derived={})

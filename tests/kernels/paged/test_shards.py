"""Ranks that hold some pages of every sequence attend, together, what one rank would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from sparsek_kernels.paged import SelectionPolicy, attend_shard, merge_shards
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.kernels.paged.cache_cases import POLICIES, Case, make_case
from tests.kernels.worst_sketch import worst_sketch

LENGTHS, QUERIES = [1, 33, 64, 131, 300, 517], [1, 2, 1, 2, 1, 2]


class Exchange:
    """Threads in place of ranks: what each brings, all of them get."""

    def __init__(self, ranks: int) -> None:
        self.brought: list[torch.Tensor | None] = [None] * ranks
        self.barrier = Barrier(ranks, timeout=60)
        self.calls = 0

    def largest(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self.brought[rank] = values
        self.barrier.wait()
        found = torch.stack([value for value in self.brought if value is not None]).amax(0)
        self.calls += rank == 0
        self.barrier.wait()
        return found


def shard(case: Case, rank: int, ranks: int) -> Case:
    """The case with every ``ranks``-th page of its sequences; other pages are poison."""
    pages = case.k_summary.shape[0]
    table = case.batch.block_table.clone()
    others = torch.arange(table.shape[1]) % ranks != rank
    used = torch.arange(table.shape[1]) * case.k_cache.shape[2] < case.batch.seq_lens[:, None]
    foreign = table[used & others].long()
    table[:, others] = -1
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    k_summary = case.k_summary.clone()
    assert foreign.unique().numel() == foreign.numel() < pages
    k_cache[foreign], v_cache[foreign] = float("nan"), float("nan")
    k_summary[foreign] = worst_sketch(*k_cache.shape[2:])
    batch = replace(case.batch, block_table=table, _derived={})
    return Case(case.q, k_cache, v_cache, k_summary, batch)


def attend(
    case: Case, policy: SelectionPolicy, ranks: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Output and log-sum-exp of every rank, and how often they exchanged scores."""
    exchange = Exchange(ranks)

    def one(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shard(case, rank, ranks)
        return attend_shard(
            mine.q,
            mine.k_cache,
            mine.v_cache,
            mine.batch,
            policy,
            largest=lambda values: exchange.largest(rank, values),
            k_summary=mine.k_summary,
        )

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks))), exchange.calls


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_merged_attention_is_that_of_one_rank(policy: SelectionPolicy) -> None:
    case = make_case(LENGTHS, QUERIES, len(LENGTHS))
    sinks = torch.linspace(-1, 2, case.q.shape[1])
    found, calls = attend(case, policy, 3)
    outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
    merged = merge_shards(outs, lses, sinks)
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, policy, sinks=sinks
    )
    torch.testing.assert_close(merged.double(), expected, atol=2e-5, rtol=1e-5)
    assert calls == (2 if policy.selects_blocks else 0)


def test_what_is_refused() -> None:
    case = make_case([64, 80], [1, 20], 1)

    def refused(policy: SelectionPolicy, **changes: object) -> None:
        given = {"k_summary": case.k_summary, **changes}
        attend_shard(case.q, case.k_cache, case.v_cache, case.batch, policy, largest=abs, **given)

    with pytest.raises(ValueError, match="batch: expected decodes alone, got 1 prefills"):
        refused(POLICIES["topk"])
    infllm = SelectionPolicy(window_size=16, top_k=2, query_tile=1, ranking="infllm")
    with pytest.raises(NotImplementedError, match=r"policy: .* got ranking='infllm'; keep whole"):
        refused(infllm)
    case.batch = case.batch.part(0, 1)
    with pytest.raises(ValueError, match="k_summary: expected the page summaries"):
        refused(POLICIES["topk"], k_summary=None)

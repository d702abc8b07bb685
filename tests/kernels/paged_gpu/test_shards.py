"""Kernels over the pages of one rank: together, ranks attend what one rank with all pages does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle_check
import pytest
import torch
from hardware import simulated
from problems import Problem, attend_phases, make_problem

from sparsek_kernels.common.device import device_arch
from sparsek_kernels.paged import merge_shards
from sparsek_kernels.paged.index.page_records import launch as records_launch
from sparsek_kernels.paged.operands import PagedOperands, Ranks
from sparsek_kernels.paged.policy import SelectionPolicy
from tests.kernels.shared_pages import held_pages, on_ranks, own_scratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP_K = SelectionPolicy(num_sink=4, window_size=40, top_k=3, sel_block_size=32, query_tile=32)
THREE = [(1, 350), (2, 433), (1, 20)]

CASES: dict[str, tuple[list[tuple[int, int]], SelectionPolicy, dict[str, Any]]] = {
    "dense": ([(1, 170), (1, 33)], SelectionPolicy(), {"page_size": 64}),
    "dense-small-pages": ([(3, 70), (2, 130)], SelectionPolicy(), {"group": 3}),
    "window": ([(1, 150), (1, 70)], SelectionPolicy(num_sink=3, window_size=50), {}),
    "topk": (THREE, TOP_K, {"group": 3, "dim": 40, "page_size": 64}),
    "topk-large-pages": (THREE, replace(TOP_K, dense_below=64), {"page_size": 128}),
    "topk-wide-group": (
        [(1, 301)],
        TOP_K,
        {"heads": 1, "group": 64, "dtype": torch.float16, "page_size": 64},
    ),
}


def attend_on_ranks(
    problem: Problem, policy: SelectionPolicy, ranks: int, sinks: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Merged output of ranks that have every ``ranks``-th page, and how often they exchanged."""
    caches = (problem.k_cache, problem.v_cache, problem.k_summary)

    def one(rank: int, group: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        (k_cache, v_cache, k_summary), batch = held_pages(caches, problem.batch, rank, ranks)
        out = torch.full(problem.q.shape, float("nan"), dtype=torch.float32, device=DEVICE)
        scale = problem.q.shape[-1] ** -0.5
        lse = torch.full(problem.q.shape[:2], float("nan"), dtype=torch.float32, device=DEVICE)
        operands = PagedOperands(
            problem.q, k_cache, v_cache, out, scale, k_summary, lse=lse, ranks=group
        )
        attend_phases(operands, batch, policy)
        return out, lse

    found, calls = on_ranks(ranks, one)
    outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
    return merge_shards(outs, lses, sinks), calls


@pytest.mark.parametrize("name", CASES)
def test_merged_attention_is_that_of_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_launch, "workspace", own_scratch)
    lengths, policy, options = CASES[name]
    problem = make_problem(lengths, num_decodes=len(lengths), device=DEVICE, **options)
    oracle_check.fill(problem)
    sinks = torch.linspace(-1, 2, problem.q.shape[1], device=DEVICE)
    found, calls = attend_on_ranks(problem, policy, 3, sinks)
    whole = torch.full(problem.q.shape, float("nan"), dtype=torch.float32, device=DEVICE)
    attend_phases(problem.operands(whole, sinks=sinks), problem.batch, policy)
    rounding = 2e-5 if problem.q.dtype == torch.float32 else 4e-3  # of weights to 16 bits
    torch.testing.assert_close(found, whole, atol=rounding, rtol=1e-4)
    assert calls == (2 if policy.selects_blocks else 0)


def test_splits() -> None:
    """One program for a row, or several, of which some have no page that is here."""
    policy = SelectionPolicy()
    problem = make_problem([(1, 433)], num_decodes=1, page_size=64, device=DEVICE)
    oracle_check.fill(problem)
    sinks = torch.zeros(problem.q.shape[1], device=DEVICE)
    found, _ = attend_on_ranks(problem, policy, 2, sinks)
    with simulated(device_arch(problem.q.device), 1):
        expected, _ = attend_on_ranks(problem, policy, 2, sinks)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert not torch.equal(found, expected)

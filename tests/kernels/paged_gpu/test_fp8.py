"""fp8 (e4m3) caches, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import oracle_check
import pytest
import torch
from problems import Problem, attend_phases, make_problem

from sparsek_kernels.paged.policy import SelectionPolicy
from tests.kernels.launched import write_launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP_K = SelectionPolicy(num_sink=4, window_size=20, top_k=2, sel_block_size=32, query_tile=32)
SCALES = (0.0371, 0.25)
LENGTHS = [(1, 140), (35, 165), (21, 21)]
PIECES = (0.05, 0.37, 0.39, 1.0)
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter rounds fp8 in its own way")


@cache
def make(cuts: tuple[float, ...] = PIECES) -> Problem:
    """A filled fp8 cache."""
    problem = make_problem(
        LENGTHS, num_decodes=1, page_size=64, device=DEVICE, cache_dtype=torch.float8_e4m3fn
    )
    oracle_check.fill(problem, cuts, SCALES, write=write_launched)
    return problem


def widened(problem: Problem) -> Problem:
    """The same cache in float32: what its values stand for."""
    return replace(
        problem,
        k_cache=problem.k_cache.float() * SCALES[0],
        v_cache=problem.v_cache.float() * SCALES[1],
    )


@on_gpu
def test_rows_are_the_nearest_fp8_values() -> None:
    problem = make()
    for rows, pages, scale in (
        (problem.keys, problem.k_cache, SCALES[0]),
        (problem.values, problem.v_cache, SCALES[1]),
    ):
        for found, slot in zip(rows, problem.slots, strict=True):
            page, row = slot // 64, slot % 64
            expected = (found / scale).to(torch.float8_e4m3fn)
            stored = pages.view(torch.uint8)[page, :, row].view(torch.float8_e4m3fn)
            error = (stored.float() - expected.float()).abs()
            assert (error <= expected.float().abs() / 8).all()
            assert (error == 0).float().mean() > 0.999


def test_the_records_are_of_the_stored_rows_however_they_came() -> None:
    whole, pieces = make((1.0,)), make()
    assert torch.equal(whole.k_cache.view(torch.uint8), pieces.k_cache.view(torch.uint8))
    assert torch.equal(whole.k_summary, pieces.k_summary)
    assert not (whole.k_summary == 255).all()


@pytest.mark.parametrize(
    "policy",
    [
        SelectionPolicy(),
        SelectionPolicy(num_sink=3, window_size=50),
        TOP_K,
    ],
    ids=["dense", "window", "top_k"],
)
def test_against_oracle(policy: SelectionPolicy) -> None:
    problem = make()
    out = torch.full_like(problem.q, float("nan"))
    operands = problem.operands(out, k_scale=SCALES[0], v_scale=SCALES[1])
    rule = oracle_check.without_records(policy)
    attend_phases(operands, problem.batch, rule)
    chosen = None
    if policy.selects_blocks:
        chosen = oracle_check.Chosen(problem, rule, k_scale=SCALES[0])
    want = oracle_check.expected(widened(problem), rule, chosen=chosen)
    assert (out.double().cpu() - want).abs().max() <= 1e-4


@on_gpu
def test_too_large_values_are_clipped() -> None:
    problem = make_problem([(1, 20)], device=DEVICE, cache_dtype=torch.float8_e4m3fn)
    problem.keys[0][3, 0, 5] = 1e5
    problem.keys[0][4, 1, 6] = -1e5
    oracle_check.fill(problem)
    assert problem.k_cache.float().nan_to_num().abs().max() == 448.0
    stored = problem.slots[0]
    rows = problem.k_cache.view(torch.uint8)[stored // 64, :, stored % 64]
    assert rows.view(torch.float8_e4m3fn).float().isfinite().all()

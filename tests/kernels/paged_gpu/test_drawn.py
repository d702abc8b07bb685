"""Blocks that prefill tiles draw: the kernels' lists and weights, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import oracle_check
import pytest
import test_rank
import torch
import triton.language as tl
from problems import Problem, make_problem, phases, select_phases

from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.kernels import draw
from sparsek_kernels.paged.index.launch import Scores
from sparsek_kernels.paged.index.problem import Selection, Step
from sparsek_kernels.paged.index.reference import start_reference
from sparsek_kernels.paged.index.two_step import launch as two_step_launch
from sparsek_kernels.paged.index.two_step import launch_probabilities
from sparsek_kernels.paged.index.two_step.reference import drawn_error
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.prefill_tiles import prefill_tiles
from sparsek_kernels.paged.reference import (
    candidates_reference,
    head_masses_reference,
    tile_scores_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SelectionPolicy(
    num_sink=4, window_size=20, top_k=4, sel_block_size=16, query_tile=32, drawn=True
)
CASES = {
    "blocks-of-16": ([(100, 450), (31, 413), (64, 64)], SMALL, {"group": 3}),
    "blocks-of-48": ([(70, 940)], replace(SMALL, sel_block_size=48, top_k=3), {"page_size": 48}),
    "blocks-of-64": (
        [(1, 200), (70, 1500), (65, 130)],
        replace(SMALL, sel_block_size=64, query_tile=64, top_k=3),
        {"num_decodes": 1, "dim": 40},
    ),
    "blocks-over-pages": (
        [(40, 1100)],
        replace(SMALL, sel_block_size=64, top_k=3, num_sink=0, window_size=1),
        {"page_size": 32, "heads": 1, "group": 4},
    ),
    "all-are-candidates": ([(40, 300)], replace(SMALL, top_k=8), {}),
    "dense-below": ([(150, 400)], replace(SMALL, dense_below=320), {}),
}


@pytest.fixture(autouse=True)
def rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is interpreted reads rows of scores in several chunks."""
    if DEVICE == "cpu":
        monkeypatch.setattr(draw, "CHUNK", tl.constexpr(16))


def check_sample(
    lists: list[list[int]],
    listed: list[list[int]],
    masses: torch.Tensor,
    means: torch.Tensor,
    rule: SelectionPolicy,
    position: int,
    tolerance: float,
) -> None:
    """Of each kind of blocks every KV head has a sample by its scores.

    Args:
        listed: candidates.
        masses: ``[samples, Hkv, G, blocks]``.
        means: ``[Hkv, blocks]``, first scores.
        position: of the tile's first query.
        tolerance: most relative error of a score.
    """
    exact, start = masses.square().sum((0, 2)).sqrt(), start_reference(position // rule.query_tile)
    for head, (row, mine) in enumerate(zip(lists, listed, strict=True)):
        entries = [entry for entry in row if entry >= 0]
        blocks = [entry % (1 << draw.CELL_BITS.value) for entry in entries]
        assert row == entries + [-1] * (rule.scored_blocks - len(entries))
        assert blocks == sorted(set(blocks))
        others = sorted({*range(*rule.candidate_range(position))} - {*mine})
        assert set(blocks) <= {*mine, *others}
        count = min(rule.other_blocks, len(others))
        for scored, of, places in (
            (exact[head, mine], mine, rule.scored_blocks - count),
            (means[head].double()[others], others, count),
        ):
            chosen = [entry for entry, block in zip(entries, blocks, strict=True) if block in of]
            wrong = drawn_error(scored, of, places, start, chosen, tolerance) if of else ""
            assert not wrong, (position, head, wrong)


@pytest.mark.parametrize("name", CASES)
def test_lists_are_the_oracles_and_weights_are_attended(name: str) -> None:
    """In float32, where nothing is rounded to 16 bits."""
    lengths, policy, options = CASES[name]
    problem = make_problem(lengths, device=DEVICE, query_gain=1.5, **options)
    oracle_check.fill(problem)
    rule = oracle_check.without_records(policy)
    found = oracle_check.attend(problem, rule).double().cpu()
    first = problem.batch.num_decodes
    prefills = problem.batch.part(first, len(lengths))
    lists = [
        row.tolist()
        for mine in select_phases(problem.operands(problem.q), prefills, rule)
        for row in mine.cpu()
    ]
    asked = iter(lists)
    weighted = 0

    def checked(
        q: torch.Tensor, k: torch.Tensor, positions: list[int], rule: SelectionPolicy, scale: float
    ) -> list[list[int]] | None:
        nonlocal weighted
        got = next(asked)
        if rule.sees_all(positions[0]):
            assert got == [[-1] * rule.scored_blocks] * len(got)
            return None
        drawing = (q, k, positions)
        means = tile_scores_reference(*drawing, rule, scale)
        listed = candidates_reference(*drawing, rule, scale)
        masses = head_masses_reference(*drawing, listed, rule, scale)
        check_sample(got, listed, masses, means, rule, positions[0], 1e-4)
        weighted += sum(entry >> draw.CELL_BITS.value > 0 for row in got for entry in row)
        return got

    expected = oracle_check.expected(problem, rule, chosen=checked)
    assert not list(asked)
    assert weighted
    assert (found - expected).abs().max() <= oracle_check.TOLERANCE[torch.float32]


RANKED = {
    "small": test_rank.Case([(100, 1200), (31, 900), (64, 64)], SMALL, {"group": 3}),
    "units": test_rank.Case(
        [(70, 2100)], replace(SMALL, sel_block_size=128, query_tile=64, top_k=3), {"heads": 1}
    ),
    "pages": test_rank.Case(
        [(130, 2300)],
        replace(SMALL, sel_block_size=64, query_tile=64, num_sink=64, window_size=129, top_k=5),
        test_rank.PAGES,
    ),
}
REAL = {
    "default": test_rank.Case(
        [(300, 20000), (65, 33000)],
        SelectionPolicy(num_sink=64, window_size=512, top_k=48, drawn=True),
        {"group": 4, "dim": 128},
    ),
    "wide": test_rank.Case(
        [(300, 9000)],
        SelectionPolicy(num_sink=64, window_size=512, top_k=16, query_tile=128, drawn=True),
        {"group": 16, "dim": 64},
    ),
}


def check_ranked(case: test_rank.Case, dtype: torch.dtype, tolerance: float) -> None:
    """Lists of random candidates and random first scores: of each kind a sample by its scores."""
    problem = make_problem(case.lengths, dtype=dtype, device=DEVICE, query_gain=1.5, **case.options)
    rule, heads, scale = case.policy, problem.k_cache.shape[1], problem.q.shape[-1] ** -0.5
    keys = test_rank.fill_keys(problem, 1.0)
    tiles = test_rank.tiles_of(case, problem)
    drawn = test_rank.draw_candidates(case, tiles, heads)
    table = prefill_tiles(problem.batch, rule.query_tile, problem.q.shape[0])
    shape = (table.shape[0], heads, rule.scored_blocks)
    out = torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
    call = Selection(out, problem.operands(problem.q), problem.batch, rule, table)
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(len(tiles), heads, call.width, generator=generator).mul(3.0).exp2()
    means[:, :, ::7] = 0.0
    most = rule.listed_blocks
    padded = [[row + [-1] * (most - len(row)) for row in lists] for lists in drawn]
    given = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
    row = means.to(DEVICE, copy=True).flatten()  # overwritten
    scores = Scores(row, (heads * call.width, call.width, 0))
    launch_probabilities.rank_blocks(call, Step(0, len(tiles)), given, scores)
    offsets, checked = problem.batch.cu_seqlens_q.tolist(), 0
    for index, (request, base, positions) in enumerate(tiles):
        if not positions or rule.sees_all(base):
            assert not positions or (out[index] == -1).all()
            continue
        new, length = case.lengths[request]
        token = offsets[request] + positions[0] - (length - new)
        masses = head_masses_reference(
            problem.q[token : token + len(positions)].cpu(),
            keys[request],
            list(positions),
            drawn[index],
            rule,
            scale,
        )
        got = out[index].tolist()
        check_sample(got, drawn[index], masses, means[index], rule, base, tolerance)
        competing = range(*rule.candidate_range(base))
        checked += len(competing) > rule.listed_blocks
    assert checked


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("name", RANKED)
def test_samples_by_given_scores(name: str, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_probabilities, "listed_shares", lambda *_: shares)
    check_ranked(RANKED[name], torch.float16, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name: str, page_size: int) -> None:
    case = REAL[name]
    options = {"page_size": page_size, "head_major": page_size == 64}
    check_ranked(replace(case, options=options | case.options), torch.bfloat16, 1e-3)


def test_scores_of_nan_queries_draw_blocks_that_there_are() -> None:
    problem = make_problem([(40, 900)], device=DEVICE)
    oracle_check.fill(problem)
    problem.q.fill_(float("nan"))
    (chosen,) = select_phases(problem.operands(problem.q), problem.batch, SMALL)
    blocks = chosen[chosen >= 0] % (1 << draw.CELL_BITS.value)
    assert blocks.numel() >= chosen.shape[:2].numel()
    assert ((blocks >= 1) & (blocks < 900 // 16)).all()


def attended_without_blocks(problem: Problem, policy: SelectionPolicy) -> None:
    """Lists may be empty: rows that begin with places that hold -1 attend the rest as it is."""
    oracle_check.fill(problem)
    (segment,) = phases(problem.batch, policy)
    count = prefill_tiles(problem.batch, policy.query_tile, problem.q.shape[0]).shape[0]
    lists = torch.full((count, problem.k_cache.shape[1], policy.scored_blocks), -1, device=DEVICE)
    out = torch.full_like(problem.q, float("nan"))
    operands = problem.operands(out)
    attend_launch.attend_segment(operands, segment, Chosen(lists.to(torch.int32)))

    def nothing(
        q: torch.Tensor, k: torch.Tensor, positions: list[int], rule: SelectionPolicy, scale: float
    ) -> list[list[int]] | None:
        return None if rule.sees_all(positions[0]) else [[-1] * rule.scored_blocks] * k.shape[1]

    error = (out.double().cpu() - oracle_check.expected(problem, policy, chosen=nothing)).abs()
    assert error.max() <= oracle_check.TOLERANCE[problem.q.dtype]


@pytest.mark.parametrize("size", [16, 64])
def test_lists_may_be_empty(size: int) -> None:
    policy = replace(SMALL, num_sink=0, window_size=1, sel_block_size=size)
    attended_without_blocks(make_problem([(100, 450), (9, 400)], device=DEVICE), policy)


def test_learned_sinks_and_scratch_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([(100, 450), (40, 700)], device=DEVICE)
    oracle_check.fill(problem)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0], device=DEVICE)
    whole = oracle_check.attend(problem, SMALL, sinks)
    chosen = oracle_check.Drawn(problem, SMALL)
    want = oracle_check.expected(problem, SMALL, sinks, chosen)
    assert (whole.double().cpu() - want).abs().max() <= oracle_check.TOLERANCE[torch.float32]
    monkeypatch.setattr(two_step_launch, "SCRATCH_ELEMENTS", 64)
    assert torch.allclose(whole, oracle_check.attend(problem, SMALL, sinks), atol=1e-6, rtol=0)

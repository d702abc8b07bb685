"""Every paged kernel at tiny shapes, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import Any

import oracle_check
import pytest
import torch
from problems import Problem, make_problem, select_phases

from sparsek_kernels.paged.index import launch as index_launch
from sparsek_kernels.paged.index.cell_means import launch as cell_means_launch
from sparsek_kernels.paged.policy import MOST_BLOCKS, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.sample import CELL_BITS, MOST_CELLS
from tests.kernels.launched import run_launched, write_launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP_K = SelectionPolicy(num_sink=4, window_size=40, top_k=3, sel_block_size=32, query_tile=32)
WINDOW = SelectionPolicy(num_sink=3, window_size=50)
DENSE = SelectionPolicy()

CASES = {
    "dense-decode": ([(1, 70), (1, 33)], DENSE, {"num_decodes": 2}),
    "dense-pages-of-48": ([(1, 70), (40, 130)], DENSE, {"num_decodes": 1, "page_size": 48}),
    "window-pages-of-48": ([(1, 150), (40, 170)], WINDOW, {"num_decodes": 1, "page_size": 48}),
    "dense-prefill-whole": ([(40, 70), (17, 17)], DENSE, {"group": 3}),
    "dense-speculative": ([(3, 70), (2, 130)], DENSE, {"num_decodes": 2, "page_size": 32}),
    "window-mixed": ([(1, 150), (40, 170)], WINDOW, {"num_decodes": 1, "page_size": 32}),
    "window-dense-below": (
        [(1, 90), (70, 190)],
        replace(WINDOW, dense_below=160, query_tile=16),
        {"num_decodes": 1},
    ),
    "window-dense-below-no-tile": (
        [(1, 90), (70, 130), (130, 170)],
        replace(WINDOW, window_size=20, dense_below=100),
        {"num_decodes": 1},
    ),
    "topk-prefill": ([(100, 350)], TOP_K, {"page_size": 32}),
    "topk-mixed": (
        [(2, 301), (1, 40), (77, 390), (30, 30)],
        TOP_K,
        {"num_decodes": 2, "page_size": 64, "dim": 40},
    ),
    "topk-tile-over-block": (
        [(133, 390)],
        replace(TOP_K, query_tile=64, sel_block_size=48),
        {"page_size": 48},
    ),
    "topk-tile-straddles-blocks": (
        [(1, 300), (150, 390)],
        replace(TOP_K, query_tile=24),
        {"num_decodes": 1},
    ),
    "topk-block-over-pages": (
        [(1, 333), (100, 390)],
        replace(TOP_K, sel_block_size=96),
        {"num_decodes": 1, "page_size": 32},
    ),
    "topk-window-takes-the-only-place": (  # so that nothing is selected
        [(1, 150), (40, 140)],
        replace(TOP_K, top_k=1),
        {"num_decodes": 1, "page_size": 32},
    ),
    "topk-of-cells-window-takes-the-only-place": (
        [(1, 150), (40, 140)],
        replace(TOP_K, top_k=1, sel_block_size=16),
        {"num_decodes": 1},
    ),
    "topk-wide-group": ([(40, 200)], replace(TOP_K, query_tile=16), {"heads": 1, "group": 8}),
}


def select(problem: Problem, policy: SelectionPolicy = TOP_K) -> list[torch.Tensor]:
    """The blocks of every tile that there is, by request."""
    return select_phases(problem.operands(problem.q), problem.batch, policy)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 32, "head_major": True},
        {"page_size": 48, "heads": 3},
        {"page_size": 64, "dim": 40},
        {"page_size": 128, "heads": 1},
    ],
    ids=str,
)
def test_the_kernel_fills_pages_in_pieces(options: dict[str, Any]) -> None:
    problem = make_problem([(1, 33), (9, 131)], device=DEVICE, **options)
    oracle_check.fill(problem, write=write_launched)
    oracle_check.check_cache(problem)


@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name: str) -> None:
    lengths, policy, options = CASES[name]
    oracle_check.check(make_problem(lengths, device=DEVICE, **options), policy)


@pytest.mark.parametrize(
    ("lengths", "left"),
    [
        ([(1, 301), (77, 390), (60, 300), (50, 420)], (0, 0, 20, -10)),
        ([(1, 301), (207, 420)], (0, 0)),
    ],
    ids=["several", "one"],
)
def test_ends_of_prompts(lengths: list[tuple[int, int]], left: tuple[int, ...]) -> None:
    """All of one, a part of the next one's, and one before what follows it: gathered rows.

    Or one alone, whose tiles in the end are left out.
    """
    problem = make_problem(lengths, num_decodes=1, device=DEVICE)
    known = {"seq_lens_host": tuple(length for _, length in lengths), "prompt_left_host": left}
    problem.batch = replace(problem.batch, **known, _derived={})
    oracle_check.fill(problem)
    policy = oracle_check.without_records(replace(TOP_K, dense_last=90 if len(left) == 2 else 32))
    out = torch.full_like(problem.q, float("nan"))
    run_launched(problem.operands(out), problem.batch, policy)
    chosen = oracle_check.Chosen(problem, policy)
    wanted = oracle_check.expected(problem, policy, chosen=chosen)
    error = (out.double().cpu() - wanted).abs().max().item()
    assert error <= oracle_check.TOLERANCE[problem.q.dtype]


@pytest.mark.parametrize("num_decodes", [0, 1], ids=["prefill", "decode"])
def test_a_window_is_dense_at_the_positions_below(num_decodes: int) -> None:
    problem = make_problem([(70, 130)], num_decodes=num_decodes, device=DEVICE)
    oracle_check.fill(problem)
    found = oracle_check.attend(problem, replace(WINDOW, window_size=20, dense_below=100))
    below = oracle_check.attend(problem, DENSE)[:40]
    above = oracle_check.attend(problem, replace(WINDOW, window_size=20))[40:]
    torch.testing.assert_close(found, torch.cat([below, above]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["dense-decode", "window-mixed", "topk-block-over-pages"])
def test_pages_past_a_sequence_change_nothing(name: str) -> None:
    lengths, policy, options = CASES[name]
    problem = make_problem(lengths, device=DEVICE, **options)
    oracle_check.fill(problem)
    expected = oracle_check.attend(problem, policy)
    for (_, length), pages in zip(lengths, problem.batch.block_table, strict=True):
        pages[-(-length // problem.k_cache.shape[2]) :] = 1 << 30
    problem.batch = replace(problem.batch, _derived={})  # whose parts may be copies
    assert torch.equal(expected, oracle_check.attend(problem, policy))


@pytest.mark.parametrize("policy", [TOP_K, WINDOW], ids=["topk", "window"])
def test_learned_sinks(policy: SelectionPolicy) -> None:
    problem = make_problem([(1, 150), (20, 140)], num_decodes=1, device=DEVICE, head_major=True)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0], device=DEVICE)
    oracle_check.check(problem, policy, sinks)


def check_dense(policy: SelectionPolicy | StepPolicy) -> None:
    """A policy that selects everything gives what attention to everything gives, to the last bit.

    Of decodes on a GPU to the tolerance: with cells, logits are rounded when the logs of weights
    are added to them, 0 here; without, the compiler fuses their scaling into the next subtraction.
    """
    problem = make_problem([(1, 150), (40, 140)], num_decodes=1, device=DEVICE)
    oracle_check.fill(problem)
    found, expected = (oracle_check.attend(problem, rule) for rule in (policy, DENSE))
    torch.testing.assert_close(found[1:], expected[1:], atol=0.0, rtol=0.0)
    limit = oracle_check.TOLERANCE[found.dtype] if DEVICE == "cuda" else 0.0
    torch.testing.assert_close(found[:1], expected[:1], atol=limit, rtol=0.0)


def test_budget_over_context_equals_dense() -> None:
    check_dense(SelectionPolicy(num_sink=4, window_size=40, top_k=64))


def test_a_budget_far_above_all_contexts_needs_no_list_that_long() -> None:
    prefill = SelectionPolicy(num_sink=4, window_size=40, top_k=MOST_BLOCKS)
    check_dense(StepPolicy(prefill, prefill.by_records(2 * MOST_CELLS)))


def test_of_equal_scores_a_sample_is_spread_evenly() -> None:
    problem = make_problem([(32, 640)], device=DEVICE)
    problem.q.mul_(8.0).round_()  # sums of small integers are exact, in whatever order
    problem.keys[0] = torch.ones_like(problem.keys[0])
    oracle_check.fill(problem)
    (chosen,) = select(problem)
    (entries,) = {tuple(row) for row in chosen[0].tolist()}
    begin, end = TOP_K.candidate_range(608)
    first, second = (entry % (1 << CELL_BITS) for entry in entries)
    assert begin <= first < (begin + end) / 2 <= second < end
    assert {entry >> CELL_BITS for entry in entries} == {round(32 * log2((end - begin) / 2))}


def test_scores_of_nan_queries_stay_in_range() -> None:
    problem = make_problem([(1, 640), (40, 600)], num_decodes=1, device=DEVICE)
    oracle_check.fill(problem)
    problem.q.fill_(float("nan"))
    decode, prefill = select(problem)
    cells = decode[decode >= 0] % (1 << CELL_BITS)
    assert ((cells >= 32) & (cells < 320)).all()
    blocks = prefill[prefill >= 0] % (1 << CELL_BITS)
    assert ((blocks >= 1) & (blocks < 20)).all()


def test_padded_requests_write_zeros_or_nothing() -> None:
    problem = make_problem([(1, 150), (1, 40)], num_decodes=2, device=DEVICE)
    oracle_check.fill(problem)
    problem.batch.seq_lens[1] = 0
    out = oracle_check.attend(problem, TOP_K)
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()


def test_scratch_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([(1, 350), (1, 433), (60, 400)], num_decodes=2, device=DEVICE)
    oracle_check.fill(problem)
    whole = oracle_check.attend(problem, TOP_K)
    for module in (index_launch, cell_means_launch):
        monkeypatch.setattr(module, "SCRATCH_ELEMENTS", 64)
    assert torch.allclose(whole, oracle_check.attend(problem, TOP_K), atol=1e-6, rtol=0)


def test_selection_of_parts() -> None:
    """Query tokens of a part keep their offsets in the whole batch."""
    problem = make_problem([(1, 301), (50, 390), (70, 400)], num_decodes=1, device=DEVICE)
    oracle_check.fill(problem)
    for request, expected in enumerate(select(problem)):
        part = replace(problem, batch=problem.batch.part(request, request + 1))
        assert torch.equal(select(part)[0], expected)

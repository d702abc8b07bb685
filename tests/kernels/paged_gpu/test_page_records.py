"""Choosing cells by records: the kernels and the torch path against the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import Chosen, PageRecords, SelectionPolicy
from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.index.page_records import config, cpu, cpu_write, launch, launch_write
from sparsek_kernels.paged.index.page_records.reference import (
    Choice,
    choose_reference,
    key_reference,
    swap_error,
)
from sparsek_kernels.paged.operands import PagedOperands, Ranks
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.record import page_bytes
from tests.kernels.shared_pages import held_pages, on_ranks, own_scratch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
RULE = SelectionPolicy(num_sink=20, window_size=100, top_k=60, dense_below=300).by_records(256)
MIXED = [(1, 900), (4, 1410), (1, 200), (1, 640), (3, 302), (2, 66), (2, 897)]
"""New tokens and lengths of requests, of which some see everything, and some complete a segment."""


@dataclass
class Case:
    """A filled problem with its records, as an indexer takes it."""

    problem: Problem
    operands: PagedOperands
    segment: Segment


def make_case(
    lengths: list[tuple[int, int]],
    policy: SelectionPolicy = RULE,
    *,
    device: str = DEVICE,
    triton: bool = True,
    key_bias: torch.Tensor | None = None,
    **options: Any,
) -> Case:
    """Random keys, of which a few match the queries, in pages with their records."""
    options = {"page_size": 64, "dtype": torch.float32, **options}
    problem = make_problem(lengths, num_decodes=len(lengths), device=device, **options)
    pages, heads, page_size, dim = problem.k_cache.shape
    for request, slots in enumerate(problem.slots):
        k, v = problem.keys[request], problem.values[request]
        if key_bias is not None:
            k += key_bias.to(k)
        problem.k_cache[slots // page_size, :, slots % page_size] = k.to(problem.k_cache.dtype)
        problem.v_cache[slots // page_size, :, slots % page_size] = v.to(problem.v_cache.dtype)
    size = page_bytes(page_size, dim)
    records = torch.zeros(pages, heads, size, dtype=torch.uint8, device=device)
    write = launch_write.write_records if triton else cpu_write.write_records_eager
    write(problem.k_cache, records, torch.cat(problem.slots))
    out = torch.empty_like(problem.q)
    scale = dim**-0.5
    operands = PagedOperands(
        problem.q, problem.k_cache, problem.v_cache, out, scale, records, k_scale=1.0
    )
    return Case(problem, operands, Segment(problem.batch, policy))


def first_positions(case: Case) -> list[int]:
    """Of every new token, where its request's first one is."""
    lengths, counts = host_lengths(case.problem.batch)
    spans = zip(lengths, counts, strict=True)
    return [end - count for end, count in spans for _ in range(count)]


def check(
    case: Case,
    chosen: Chosen,
    *,
    exact: float = 1.0,
    scores: float = 0.02,
    tolerance: float = 0.02,
) -> None:
    """Against the oracle.

    Args:
        exact: the share of cells that must be its own.
        scores: how wrong the scores may be by which the others are chosen.
        tolerance: of logits of tails.
    """
    policy, q = case.segment.policy, case.problem.q
    heads, page_size, dim = case.operands.heads, case.operands.page_size, q.shape[-1]
    batch, token = case.problem.batch, 0
    assert batch.seq_lens_host is not None
    assert chosen.tail is not None
    for request, slots in enumerate(case.problem.slots):
        count, length = batch.query_lens[request], batch.seq_lens_host[request]
        where = slots // page_size, slice(None), slots % page_size
        k, v = case.operands.k_cache[where].cpu(), case.operands.v_cache[where].cpu()
        rows, position = slice(token, token + count), length - count
        token = rows.stop
        if not count:
            continue
        got = chosen.indices[request].cpu().tolist()
        found = choose_reference(q[rows].cpu(), k, v, position, policy, dim**-0.5)
        if found is None:
            assert all(set(row) == {-1} for row in got)
            continue
        wanted, logits = found.cells, found.logits
        first, last = policy.candidate_range(position)
        alike = torch.ones(heads, (last - first) // 32, dtype=torch.bool)
        for head in range(heads):
            assert got[head] == sorted(set(got[head]))
            assert len(got[head]) == policy.scored_blocks
            assert first <= got[head][0]
            assert got[head][-1] < last
            other = set(got[head]) ^ set(wanted[head])
            same = 1.0 - len(other) / 2 / len(wanted[head])
            assert same >= exact, (request, head, same)
            assert swap_error(found, head, first, got[head]) <= scores
            # Where another cell was chosen, what is left differs with it.
            alike[head, [(cell - first) // 32 for cell in other]] = False
        tails = chosen.tail.logits[rows, :, first // 32 : last // 32].double().cpu()
        tails *= math.log(2.0)
        near = (tails - logits).abs() <= tolerance
        both = torch.isinf(tails) & torch.isinf(logits)
        alike = alike.repeat_interleave(q.shape[1] // heads, 0).expand(near.shape)
        assert (near | both)[alike].all()


SHAPES = [
    {"group": 4, "heads": 2, "dim": 64},
    {"group": 1, "heads": 2, "dim": 128},
    {"group": 7, "heads": 1, "dim": 80},
    {"group": 4, "heads": 1, "dim": 128, "page_size": 128},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_kernels_choose_what_the_oracle_does(shape: dict[str, int]) -> None:
    case = make_case(MIXED, **shape)
    check(case, launch.select(case.operands, case.segment), exact=0.97)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_torch_chooses_what_the_oracle_does(shape: dict[str, int]) -> None:
    case = make_case(MIXED, device="cpu", triton=False, **shape)
    check(case, cpu.select(case.operands, case.segment), exact=0.97)


def test_swaps_say_how_wrong_scores_are() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.124, 0.12, 0.11, 0.0]], dtype=torch.float64)
    choice = Choice([[7, 8, 9]], torch.empty(0), torch.empty(0), scores, rows=1)
    for mine, error in (
        ([7, 8, 9], 0.0),
        ([7, 8, 10], 0.0),  # of one key: 0.109 to 0.125
        ([7, 9, 10], 0.5 / 0.125 - 1.0),
        ([7, 8, 12], 1.0),
        ([7, 8], math.inf),
        ([6, 7, 8], math.inf),
    ):
        assert swap_error(choice, 0, 7, mine) == pytest.approx(error)


@pytest.mark.parametrize(("count", "group"), [(128, 1), (128, 4), (2, 4), (1536, 4), (1000, 7)])
def test_keys_are_quarters_of_octaves(count: int, group: int) -> None:
    scores = torch.cat([torch.zeros(1), torch.logspace(-9, 0.5, 4000)]).float()
    rule = SelectionPolicy(num_sink=64, window_size=64, top_k=1).by_records(2 * count)
    found = cpu.cell_keys(scores.clone(), rule, group)
    assert found.tolist() == key_reference(scores.double(), count, group).tolist()
    assert (found.diff() >= 0).all()
    assert (int(found[0]), int(found[-1])) == (0, 63)
    always = scores > group / count
    assert int(found[always].min()) >= config.KEYS - 4


@pytest.mark.parametrize("matrix_units", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_keys_of_hundreds_shift_no_tail(
    matrix_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of keys is in every logit of a query: what it rounds would be in every tail."""
    bias = torch.zeros(128)
    bias[3::16] = torch.tensor([350.0, -290.0, 110.0, 350.0, -170.0, 230.0, 350.0, -310.0])
    case = make_case([(1, 1500)], group=4, heads=1, dim=128, dtype=torch.bfloat16, key_bias=bias)
    case.problem.q += torch.where(bias != 0.0, 7.3 * bias.sign(), 0.0).to(case.problem.q)
    if not matrix_units:
        monkeypatch.setattr(launch, "_fits", lambda *_: False)
    chosen = launch.select(case.operands, case.segment)
    check(case, chosen, exact=0.8, scores=1.0, tolerance=0.1)


def test_equal_cells_go_to_the_lower_index() -> None:
    case = make_case([(1, 1100)], group=4, heads=1, dim=64)
    case.problem.q.zero_()
    first, _ = RULE.candidate_range(1099)
    wanted = torch.arange(first, first + RULE.scored_blocks, dtype=torch.int32)
    for chosen in (launch.select(case.operands, case.segment),):
        assert torch.equal(chosen.indices[0, 0].cpu(), wanted)


def test_queries_of_nan_choose_valid_cells() -> None:
    case = make_case([(1, 1100)], group=2, heads=2, dim=64)
    case.problem.q.fill_(float("nan"))
    first, last = RULE.candidate_range(1099)
    got = launch.select(case.operands, case.segment).indices[0].cpu()
    for row in got.tolist():
        assert row == sorted(set(row))
        assert first <= row[0]
        assert row[-1] < last


def test_steps_of_bounded_scratch_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MIXED[:3], group=4, heads=1, dim=64)
    monkeypatch.setattr(launch, "_fits", lambda *_: False)
    whole = launch.select(case.operands, case.segment)
    assert whole.tail is not None
    indices, logits = whole.indices.clone(), whole.tail.logits.clone()
    monkeypatch.setattr(launch, "_SCRATCH_ELEMENTS", 1)
    steps = launch.select(case.operands, case.segment)
    assert steps.tail is not None
    assert torch.equal(steps.indices, indices)
    assert torch.equal(steps.tail.logits.nan_to_num(), logits.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (1, 2)])
@pytest.mark.parametrize("new", [1, 4])
def test_matrix_units_choose_what_the_oracle_does(
    head_dim: int, heads: tuple[int, int], new: int
) -> None:
    case = make_case(
        [(1, 9000), (new, 5003), (1, 250), (1, 20000)],
        RULE,
        group=heads[0],
        heads=heads[1],
        dim=head_dim,
        dtype=torch.bfloat16,
    )
    chosen = launch.select(case.operands, case.segment)
    # Weights have 3 bits of mantissa; queries have 8 bits, and some logits are 20 above the mean.
    check(case, chosen, exact=0.95, scores=0.25, tolerance=0.1)
    assert chosen.tail is not None
    indices, logits = chosen.indices.clone(), chosen.tail.logits.clone()
    for _ in range(5):  # whatever the order in which programs run
        again = launch.select(case.operands, case.segment)
        assert again.tail is not None
        assert torch.equal(again.indices, indices)
        assert torch.equal(again.tail.logits.nan_to_num(), logits.nan_to_num())


@pytest.mark.gpu
def test_batches_of_bounded_scratch_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_kernels.paged.index.page_records import launch_sm80

    case = make_case([(1, 2000 + 300 * i) for i in range(9)], dtype=torch.bfloat16)
    whole = launch.select(case.operands, case.segment)
    assert whole.tail is not None
    indices, logits = whole.indices.clone(), whole.tail.logits.clone()
    monkeypatch.setattr(launch_sm80, "_SCRATCH_BYTES", 1)
    parts = launch.select(case.operands, case.segment)
    assert parts.tail is not None
    assert torch.equal(parts.indices, indices)
    assert torch.equal(parts.tail.logits.nan_to_num(), logits.nan_to_num())


@pytest.mark.gpu
def test_one_launch_takes_more_equal_cells_than_16_bits_count() -> None:
    rule = SelectionPolicy(num_sink=64, window_size=512, top_k=1).by_records(4096)
    case = make_case([(1, 200_000)], rule, group=4, heads=1, dim=128, dtype=torch.bfloat16)
    case.problem.q.zero_()
    first, _ = rule.candidate_range(199_999)
    got = launch.select(case.operands, case.segment).indices[0, 0].cpu()
    assert torch.equal(got, torch.arange(first, first + rule.scored_blocks, dtype=torch.int32))


def test_what_records_do_not_serve_is_refused() -> None:
    case = make_case([(1, 900)], group=4, heads=1, dim=64, device="cpu")
    tiles = SelectionPolicy(num_sink=64, window_size=64, top_k=4).per_token()
    with pytest.raises(ValueError, match="alignment 64 and sel_block_size 2"):
        PageRecords().check(tiles, case.operands.k_cache)
    prompt = make_problem([(5, 900)], num_decodes=0, group=4, heads=1, dim=64)
    with pytest.raises(ValueError, match=r"segment: .* plan the step by plan_step"):
        PageRecords().select(case.operands, Segment(prompt.batch, RULE))


@pytest.mark.parametrize("page_size", [64, 128])
def test_ranks_choose_what_one_does(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has every third page of a sequence, and the tails of its own segments."""
    case = make_case(MIXED, group=3, heads=2, dim=64, page_size=page_size)
    batch, policy = case.problem.batch, case.segment.policy
    monkeypatch.setattr(launch, "_fits", lambda *_: False)
    alone = launch.select(case.operands, case.segment)
    assert alone.tail is not None
    indices, logits = alone.indices.clone(), alone.tail.logits.clone()
    caches = (case.operands.k_cache, case.operands.v_cache, case.operands.summary)

    monkeypatch.setattr(launch, "workspace", own_scratch)

    def one(rank: int, group: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        (k_cache, v_cache, records), held = held_pages(caches, batch, rank, 3)
        operands = replace(
            case.operands, k_cache=k_cache, v_cache=v_cache, k_summary=records, ranks=group
        )
        chosen = launch.select(operands, Segment(held, policy))
        assert chosen.tail is not None
        return chosen.indices, chosen.tail.logits

    found, calls = on_ranks(3, one)
    assert calls == 2  # totals and keys, of all tokens together
    assert all(torch.equal(mine, indices) for mine, _ in found)
    tails = torch.stack([mine for _, mine in found])
    for token, position in enumerate(first_positions(case)):
        first, last = (cell // 32 for cell in policy.candidate_range(position))
        if not policy.sees_all(position):
            each, whole = tails[:, token, :, first:last], logits[token, :, first:last]
            torch.testing.assert_close(each.amax(0), whole, atol=1e-5, rtol=0.0)
            assert torch.equal((each > -math.inf).sum(0), (whole > -math.inf).long())

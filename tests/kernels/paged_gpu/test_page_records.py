"""Choosing cells by records: the kernels and the torch path against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import Chosen, PageRecords, SelectionPolicy
from sparsek_kernels.paged.index.page_records import cpu, cpu_write, launch, launch_write
from sparsek_kernels.paged.index.page_records.reference import choose_reference
from sparsek_kernels.paged.operands import PagedOperands, Ranks
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.record import page_bytes
from sparsek_kernels.paged.sample import CELL_BITS, KEYS, keys_of, sample_cells, start_of
from sparsek_kernels.paged.sample_reference import key_reference, list_error
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


def check(case: Case, chosen: Chosen, scores: float = 0.02) -> None:
    """Lists that the rule draws by scores that are wrong by no more than this."""
    q, batch, page_size, token = case.problem.q, case.problem.batch, case.operands.page_size, 0
    assert batch.seq_lens_host is not None
    for request, slots in enumerate(case.problem.slots):
        count, length = batch.query_lens[request], batch.seq_lens_host[request]
        k = case.operands.k_cache[slots // page_size, :, slots % page_size].cpu()
        rows = slice(token, token + count)
        token = rows.stop
        if not count:
            continue
        got = chosen.indices[request].cpu().tolist()
        scale = q.shape[-1] ** -0.5
        found = choose_reference(q[rows].cpu(), k, length - count, case.segment.policy, scale)
        if found is None:
            assert all(set(row) == {-1} for row in got)
            continue
        wrong = [list_error(found, head, row, scores) for head, row in enumerate(got)]
        assert not any(wrong), (request, wrong)


SHAPES = [
    {"group": 4, "heads": 2, "dim": 64},
    {"group": 1, "heads": 2, "dim": 128},
    {"group": 7, "heads": 1, "dim": 80},
    {"group": 4, "heads": 1, "dim": 128, "page_size": 128},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_kernels_choose_what_the_oracle_does(shape: dict[str, int]) -> None:
    case = make_case(MIXED, **shape)
    check(case, launch.select(case.operands, case.segment))


@pytest.mark.parametrize("matrix_units", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_heads_may_lie_more_than_31_bits_apart(
    matrix_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of a long prompt lie far apart where each head is stored whole."""
    case = make_case(MIXED, group=2, heads=2, dim=64, dtype=torch.float16)
    tokens, heads, dim = case.problem.q.shape
    far = 3 << 28
    room = torch.empty((heads - 1) * far + tokens * dim, dtype=torch.float16, device=DEVICE)
    q = room.as_strided((tokens, heads, dim), (dim, far, 1)).copy_(case.problem.q)
    case.operands = replace(case.operands, q=q)
    if not matrix_units:
        monkeypatch.setattr(launch, "_fits", lambda *_: False)
    chosen = launch.select(case.operands, case.segment)
    check(case, chosen, scores=0.25 if matrix_units else 0.02)  # weights of 3 bits of mantissa


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_torch_chooses_what_the_oracle_does(shape: dict[str, int]) -> None:
    case = make_case(MIXED, device="cpu", triton=False, **shape)
    check(case, cpu.select(case.operands, case.segment))


@pytest.mark.parametrize(("count", "group"), [(128, 1), (128, 4), (2, 4), (1536, 4), (1000, 7)])
def test_keys_are_quarters_of_octaves(count: int, group: int) -> None:
    scores = torch.cat([torch.zeros(1), torch.logspace(-9, 0.5, 4000)]).float()
    found = keys_of(scores.clone(), count, group)
    assert found.tolist() == key_reference(scores.double(), count, group).tolist()
    assert (found.diff() >= 0).all()
    assert (int(found[0]), int(found[-1])) == (0, 63)
    always = scores > group / count
    assert int(found[always].min()) >= KEYS - 4


@pytest.mark.parametrize("matrix_units", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_keys_of_hundreds_shift_no_score(
    matrix_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of keys is in every logit of a query: what it rounds would be in every score."""
    bias = torch.zeros(128)
    bias[3::16] = torch.tensor([350.0, -290.0, 110.0, 350.0, -170.0, 230.0, 350.0, -310.0])
    case = make_case([(1, 1500)], group=4, heads=1, dim=128, dtype=torch.bfloat16, key_bias=bias)
    case.problem.q += torch.where(bias != 0.0, 7.3 * bias.sign(), 0.0).to(case.problem.q)
    if not matrix_units:
        monkeypatch.setattr(launch, "_fits", lambda *_: False)
    check(case, launch.select(case.operands, case.segment), scores=0.25)


def equal_cells(policy: SelectionPolicy, position: int, heads: int) -> list[list[int]]:
    """The lists of a token, of cells with one key."""
    first, last = policy.candidate_range(position)
    keys, counts = torch.zeros((last - first) // 32, 32, dtype=torch.long), torch.zeros(64)
    counts[0] = last - first
    mine = sample_cells(keys, policy.scored_blocks, start_of(position))
    return [torch.where(mine < 0, mine, mine + first).tolist()] * heads


@pytest.mark.parametrize("query", [0.0, float("nan")], ids=str)
def test_equal_cells_are_drawn_evenly(query: float) -> None:
    """Scores that are no numbers are equal too."""
    case = make_case([(1, 1100)], group=2, heads=2, dim=64)
    case.problem.q.fill_(query)
    got = launch.select(case.operands, case.segment).indices[0].cpu()
    assert got.tolist() == equal_cells(RULE, 1099, 2)
    assert (got >> CELL_BITS).max() == 58  # 3.5 cells a place


def test_steps_of_bounded_scratch_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MIXED[:3], group=4, heads=1, dim=64)
    monkeypatch.setattr(launch, "_fits", lambda *_: False)
    whole = launch.select(case.operands, case.segment)
    indices = whole.indices.clone()
    monkeypatch.setattr(launch, "_SCRATCH_ELEMENTS", 1)
    steps = launch.select(case.operands, case.segment)
    assert torch.equal(steps.indices, indices)


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
    check(case, chosen, scores=0.25)
    indices = chosen.indices.clone()
    for _ in range(5):  # whatever the order in which programs run
        again = launch.select(case.operands, case.segment)
        assert torch.equal(again.indices, indices)


@pytest.mark.gpu
def test_batches_of_bounded_scratch_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_kernels.paged.index.page_records import launch_sm80

    case = make_case([(1, 2000 + 300 * i) for i in range(9)], dtype=torch.bfloat16)
    whole = launch.select(case.operands, case.segment)
    indices = whole.indices.clone()
    monkeypatch.setattr(launch_sm80, "_SCRATCH_BYTES", 1)
    parts = launch.select(case.operands, case.segment)
    assert torch.equal(parts.indices, indices)


@pytest.mark.gpu
def test_one_launch_takes_more_equal_cells_than_16_bits_count() -> None:
    rule = SelectionPolicy(num_sink=64, window_size=512, top_k=1).by_records(4096)
    case = make_case([(1, 200_000)], rule, group=4, heads=1, dim=128, dtype=torch.bfloat16)
    case.problem.q.zero_()
    got = launch.select(case.operands, case.segment).indices[0].cpu()
    assert got.tolist() == equal_cells(rule, 199_999, 1)


def test_what_records_do_not_serve_is_refused() -> None:
    case = make_case([(1, 900)], group=4, heads=1, dim=64, device="cpu", triton=False)
    tiles = SelectionPolicy(num_sink=64, window_size=64, top_k=4).per_token()
    with pytest.raises(ValueError, match="alignment 64 and sel_block_size 2"):
        PageRecords().check(tiles, case.operands.k_cache)
    prompt = make_problem([(5, 900)], num_decodes=0, group=4, heads=1, dim=64)
    with pytest.raises(ValueError, match=r"segment: .* plan the step by plan_step"):
        PageRecords().select(case.operands, Segment(prompt.batch, RULE))


@pytest.mark.parametrize("page_size", [64, 128])
def test_ranks_choose_what_one_does(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has every third page of a sequence."""
    case = make_case(MIXED, group=3, heads=2, dim=64, page_size=page_size)
    batch, policy = case.problem.batch, case.segment.policy
    monkeypatch.setattr(launch, "_fits", lambda *_: False)
    alone = launch.select(case.operands, case.segment)
    indices = alone.indices.clone()
    caches = (case.operands.k_cache, case.operands.v_cache, case.operands.summary)

    monkeypatch.setattr(launch, "workspace", own_scratch)

    def one(rank: int, group: Ranks) -> torch.Tensor:
        (k_cache, v_cache, records), held = held_pages(caches, batch, rank, 3)
        operands = replace(
            case.operands, k_cache=k_cache, v_cache=v_cache, k_summary=records, ranks=group
        )
        return launch.select(operands, Segment(held, policy)).indices

    found, calls = on_ranks(3, one)
    assert calls == 2  # totals and keys, of all tokens together
    assert all(torch.equal(mine, indices) for mine in found)

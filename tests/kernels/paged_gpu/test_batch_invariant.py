"""A row's bits in every company: alone, among others, in chunks, decoded, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import oracle_check
import pytest
import torch
from aot import record
from problems import Problem, make_problem

from sparsek_kernels.paged import InfLLM, PageRecords, Seer, paged_attention
from sparsek_kernels.paged import scratch as runtime
from sparsek_kernels.paged.api import _check_invariance
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.index.page_records import write_records
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.record import page_bytes
from tests.kernels.launched import run_launched, write_launched
from tests.kernels.paged.gate_cases import make_gates
from tests.kernels.paged.records_oracle import decode_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP_K = SelectionPolicy(
    num_sink=4, window_size=20, top_k=3, sel_block_size=32, query_tile=32, dense_below=232
)
TENSORS = ("block_table", "seq_lens", "cu_seqlens_q")
SMALL = {
    "dense": SelectionPolicy(),
    "window": SelectionPolicy(num_sink=3, window_size=50, dense_below=232),
    "model-window": SelectionPolicy(window_size=50),
    "topk": TOP_K,
    "topk-last": replace(TOP_K, dense_last=8),
}


@dataclass(frozen=True)
class Piece:
    """Neighbouring query tokens of one request: ``rows`` of the problem's queries."""

    request: int
    rows: range
    seq_len: int


class Company:
    """The requests of a problem, to be served in steps of any composition."""

    def __init__(
        self, problem: Problem, policy: SelectionPolicy, sinks: torch.Tensor | None = None
    ) -> None:
        self.problem, self.policy, self.sinks = problem, policy, sinks
        oracle_check.fill(problem)
        self.ends = problem.batch.cu_seqlens_q.tolist()
        self.lengths = problem.batch.seq_lens.tolist()

    def piece(self, request: int, first: int, last: int) -> Piece:
        """New tokens ``first .. last - 1`` of a request; later ones are not there yet."""
        begin, end = self.ends[request : request + 2]
        length = self.lengths[request] - (end - begin) + last
        return Piece(request, range(begin + first, begin + last), length)

    def whole(self, request: int) -> Piece:
        return self.piece(request, 0, self.ends[request + 1] - self.ends[request])

    def batch(self, pieces: list[Piece], max_seq_len: int | None = None) -> PagedBatch:
        """A step; pieces of one token come first, as decodes."""
        counts = [len(piece.rows) for piece in pieces]
        decodes = sum(count == 1 for count in counts)
        assert counts[:decodes] == [1] * decodes

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.problem.q.device)

        owners = [piece.request for piece in pieces]
        return PagedBatch(
            block_table=self.problem.batch.block_table[owners],
            seq_lens=integers([piece.seq_len for piece in pieces]),
            cu_seqlens_q=integers([0, *counts]).cumsum(0).to(torch.int32),
            num_decodes=decodes,
            num_decode_tokens=decodes,
            decode_query_len=1,
            max_query_len=max(counts),
            max_seq_len=max_seq_len or max(piece.seq_len for piece in pieces),
            query_lens_host=tuple(counts),
        )

    def queries(self, pieces: list[Piece]) -> torch.Tensor:
        return self.problem.q[[row for piece in pieces for row in piece.rows]]

    def serve(
        self, pieces: list[Piece], max_seq_len: int | None = None, *, batch_invariant: bool = True
    ) -> list[torch.Tensor]:
        """The output of one step, by piece; NaN where nothing was written."""
        q = self.queries(pieces)
        out = torch.full_like(q, float("nan"))
        operands = replace(self.problem.operands(out, sinks=self.sinks), q=q)
        batch = self.batch(pieces, max_seq_len)
        run_launched(operands, batch, self.policy, batch_invariant=batch_invariant)
        return list(out.split([len(piece.rows) for piece in pieces]))


class RecordCompany(Company):
    """Requests that choose by records, which pages have of complete segments alone."""

    def serve(
        self, pieces: list[Piece], max_seq_len: int | None = None, *, batch_invariant: bool = True
    ) -> list[torch.Tensor]:
        k_cache = self.problem.k_cache
        pages, heads, page_size, dim = k_cache.shape
        shape = (pages, heads, page_bytes(page_size, dim))
        records = torch.full(shape, 255, dtype=torch.uint8, device=k_cache.device)
        for piece in pieces:
            position = torch.arange(piece.seq_len, device=k_cache.device)
            pages = self.problem.batch.block_table[piece.request].long()
            slots = pages[position // page_size] * page_size + position % page_size
            write_records(k_cache, records, slots)
        self.problem = replace(self.problem, k_summary=records)
        return super().serve(pieces, max_seq_len, batch_invariant=batch_invariant)


def company_of(problem: Problem, policy: SelectionPolicy) -> Company:
    return (RecordCompany if policy.alignment else Company)(problem, policy)


def answers(company: Company, cuts: list[int], *, batch_invariant: bool) -> Iterator[torch.Tensor]:
    """Request 0's new tokens, served in many ways; the others are a decode and a prefill."""

    def serve(pieces: list[Piece], max_seq_len: int | None = None) -> list[torch.Tensor]:
        return company.serve(pieces, max_seq_len, batch_invariant=batch_invariant)

    mine, decode, prefill = (company.whole(request) for request in range(3))
    table = company.problem.batch.block_table.shape[1] * company.problem.k_cache.shape[2]
    yield serve([mine])[0]
    yield serve([mine], table)[0]
    yield serve([decode, mine, prefill])[1]
    yield serve([decode, decode, prefill, prefill, mine])[4]
    bounds = [0, *cuts, len(mine.rows)]
    pieces = [company.piece(0, first, last) for first, last in pairwise(bounds)]
    yield torch.cat([serve([piece])[0] for piece in pieces])
    singles = [company.piece(0, row, row + 1) for row in range(len(mine.rows))]
    yield torch.cat([serve([single])[0] for single in singles[-3:]])
    yield torch.cat([serve([decode, single, prefill])[1] for single in singles[-3:]])
    yield torch.cat(serve([*singles, decode])[:-1])
    nobody = replace(decode, seq_len=0)  # as a CUDA graph is padded
    yield torch.cat(serve([decode, *singles, nobody], table)[1:-1])


@pytest.mark.parametrize("policy", SMALL)
def test_a_row_has_one_result(policy: str) -> None:
    problem = make_problem(
        [(9, 236), (1, 270), (5, 50)], page_size=64, heads=1, group=3, device=DEVICE
    )
    sinks = torch.tensor([-1.0, 0.5, 6.0], device=DEVICE)
    company = Company(problem, SMALL[policy], sinks)
    alone, *others = answers(company, [1, 6], batch_invariant=True)
    assert alone.isfinite().all()
    for place, other in enumerate(others):
        assert torch.equal(alone[-other.shape[0] :], other), place
    whole = list(answers(company, [1, 6], batch_invariant=False))
    assert not all(torch.equal(alone[-other.shape[0] :], other) for other in whole)
    rule = replace(SMALL[policy], query_tile=1, dense_last=0)
    want = oracle_check.expected(problem, rule, sinks)[: alone.shape[0]]
    assert (alone.double().cpu() - want).abs().max() < oracle_check.TOLERANCE[torch.float32]


def test_a_row_by_records_has_one_result() -> None:
    """A chunk of one completes a segment; others end before, or are attended whole."""
    shape: dict[str, Any] = {"page_size": 64, "heads": 1, "group": 3, "device": DEVICE}
    problem = make_problem([(9, 516), (1, 450), (5, 50)], **shape)
    sinks = torch.tensor([-1.0, 0.5, 6.0], device=DEVICE)
    policy = replace(TOP_K, dense_below=509).by_records(32)
    company = RecordCompany(problem, policy, sinks)
    alone, *others = answers(company, [1, 6], batch_invariant=True)
    assert alone.isfinite().all()
    for place, other in enumerate(others):
        assert torch.equal(alone[-other.shape[0] :], other), place
    tokens = problem.batch.by_token(0, 9)
    tokens = replace(tokens, **{name: getattr(tokens, name).cpu() for name in TENSORS})
    q, k_cache, v_cache = (x.cpu() for x in (problem.q[:9], problem.k_cache, problem.v_cache))
    want = decode_reference(q, k_cache, v_cache, tokens, policy, q.shape[2] ** -0.5, sinks.cpu())
    assert (alone.double().cpu() - want).abs().max() < 1e-3  # logits of vectors are in 16 bits


def test_a_step_in_slices_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([(37, 210), (1, 240)], page_size=64, heads=1, device=DEVICE)
    company = Company(problem, TOP_K)
    pieces = [company.whole(1), company.whole(0)]
    whole = company.serve(pieces)
    slices = []
    by_token = PagedBatch.by_token

    def spy(batch: PagedBatch, first: int, last: int) -> PagedBatch:
        slices.append((first, last))
        return by_token(batch, first, last)

    monkeypatch.setattr(PagedBatch, "by_token", spy)
    monkeypatch.setattr(runtime, "_ROW_ELEMENTS", 1)
    assert all(map(torch.equal, whole, company.serve(pieces)))
    assert slices == [(0, 16), (16, 32), (32, 38)]


def test_rows_outside_a_part_are_left_alone() -> None:
    problem = make_problem([(5, 70), (9, 150), (4, 90)], page_size=64, device=DEVICE)
    oracle_check.fill(problem)

    def attend(batch: PagedBatch) -> torch.Tensor:
        return oracle_check.attend(replace(problem, batch=batch), TOP_K, batch_invariant=True)

    whole, part = attend(problem.batch), attend(problem.batch.part(1, 2))
    assert part[:5].isnan().all()
    assert part[14:].isnan().all()
    assert torch.equal(part[5:14], whole[5:14])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_are_filled_alike_whatever_the_chunks(dtype: torch.dtype) -> None:
    filled = []
    for cuts in ((1.0,), (0.13, 0.5, 0.501, 0.73, 1.0), tuple(i / 77 for i in range(1, 78))):
        problem = make_problem([(1, 77), (1, 50)], page_size=64, dtype=dtype, device=DEVICE)
        oracle_check.fill(problem, cuts, write=write_launched)
        filled.append((problem.k_cache, problem.v_cache, problem.k_summary))
    for other in filled[1:]:
        for mine, theirs in zip(filled[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("policy", [*SMALL, "records"])
@pytest.mark.parametrize(("heads", "group"), [(8, 4), (2, 24)])
def test_no_batch_reconfigures_a_kernel(policy: str, heads: int, group: int) -> None:
    """As on a large GPU, where a step of few tokens would be split and one of many would not."""
    steps = [
        ([(1, 20_000)], 1),
        ([(1, 40)], 1),
        ([(1, 20_000)] * 40, 40),
        ([(1, 300)] * 33 + [(500, 600)], 33),
        ([(4000, 20_000), (1, 1), (77, 77)], 0),
    ]
    by_records = policy not in SMALL
    rule = TOP_K.by_records(4096) if by_records else SMALL[policy]
    page_size, width = 64, 1000
    cache = torch.empty(4, heads, page_size, 128, dtype=torch.bfloat16)
    size = page_bytes if by_records else summary_bytes
    summary = torch.empty(4, heads, size(page_size, 128), dtype=torch.uint8)
    seen: dict[str, list[dict[str, object]]] = {}
    for lengths, decodes in steps:
        counts = [count for count, _ in lengths]
        batch = PagedBatch(
            block_table=torch.zeros(len(lengths), width, dtype=torch.int32),
            seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            num_decodes=decodes,
            num_decode_tokens=decodes,
            decode_query_len=1,
            max_query_len=max(counts),
            max_seq_len=max(length for _, length in lengths),
        )
        q = torch.empty(sum(counts), heads * group, 128, dtype=torch.bfloat16)

        def step(batch: PagedBatch = batch, q: torch.Tensor = q) -> None:
            operands = PagedOperands(q, cache, cache, torch.empty_like(q), 0.1, summary)
            run_launched(operands, batch, rule, batch_invariant=True)

        launched = record(step, 90, 132)
        assert launched
        for one in launched:
            seen.setdefault(one.name, []).append(one.kwargs)
    assert len(seen) == (6 if rule.selects_blocks else 1)
    for kernel, options in seen.items():
        assert all(each == options[0] for each in options), kernel


def test_a_cpu_refuses() -> None:
    problem = make_problem([(1, 70)])
    with pytest.raises(NotImplementedError, match="batch_invariant: needs a GPU"):
        paged_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.batch,
            SelectionPolicy(),
            batch_invariant=True,
        )


def test_indexers_whose_scores_round_by_the_batch_are_refused() -> None:
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    for index in (None, PageRecords()):
        _check_invariance(on_gpu, index)
    for index in (InfLLM(), Seer(make_gates(1, 1, 32))):
        name = type(index).__name__
        with pytest.raises(NotImplementedError, match=f"batch_invariant: .* indexer {name}"):
            _check_invariance(on_gpu, index)


LARGE = SelectionPolicy(num_sink=64, window_size=512, top_k=16, dense_below=4096)


def large_problem(lengths: list[tuple[int, int]]) -> Problem:
    """As a model has it."""
    return make_problem(
        lengths,
        heads=2,
        group=4,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        head_major=True,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy",
    [SelectionPolicy(), replace(LARGE, top_k=0), LARGE, LARGE.by_records(1024)],
    ids=["dense", "window", "topk", "records"],
)
def test_real_sizes(policy: SelectionPolicy) -> None:
    """Request 0's rows begin before ``dense_below`` and end at 4.5k, or at 20k."""
    for length in (4500, 20_000):
        company = company_of(large_problem([(512, length), (1, 17_000), (48, 9000)]), policy)
        alone, *others = answers(company, [16, 17, 81, 209, 448], batch_invariant=True)
        assert alone.isfinite().all()
        for place, other in enumerate(others):
            assert torch.equal(alone[-other.shape[0] :], other), (length, place)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [LARGE, LARGE.by_records(1024)], ids=["topk", "records"])
def test_a_captured_step(policy: SelectionPolicy) -> None:
    """A graph of four decodes, captured for short contexts and replayed over long ones."""
    company = company_of(large_problem([(256, 12_000), (1, 17_000), (1, 90)]), policy)
    (alone,) = company.serve([company.whole(0)])
    company.serve([company.whole(1), company.whole(0)])  # whose records then are in the pages
    problem = company.problem
    rows = [255, 3]
    pieces = [company.whole(1), *(company.piece(0, row, row + 1) for row in rows)]
    pieces.append(replace(company.whole(2), seq_len=0))
    batch, q = company.batch(pieces, 20_000), company.queries(pieces)
    lengths = batch.seq_lens.clone()
    out = torch.empty_like(q)

    def step() -> None:
        paged_attention(
            q,
            problem.k_cache,
            problem.v_cache,
            batch,
            policy,
            k_summary=problem.k_summary,
            out=out,
            batch_invariant=True,
        )

    batch.seq_lens.fill_(1)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.seq_lens.copy_(lengths)
    graph.replay()
    assert torch.equal(out[1:3], alone[rows])
    assert torch.equal(out[:1], company.serve([company.whole(1)])[0])
    assert (out[3] == 0).all()

"""Records and decodes by them in C, against float64."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import PagedBatch, SelectionPolicy
from sparsek_kernels.paged.cpu.native import build, records
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.record import encode, record_bytes
from sparsek_kernels.paged.sample_reference import start_reference
from tests.kernels.paged import choice_oracle as oracle
from tests.kernels.paged.native_builds import built_without, needs_compiler
from tests.kernels.paged.record_cases import KINDS, check_decoded, segments

pytestmark = needs_compiler

SHAPES = [
    *((queries, *shape) for queries in (1, 4) for shape in ((1, 32), (4, 64), (7, 80), (4, 128))),
    *((1, 64, 16), (4, 16, 16), (1, 2, 256), (4, 2, 256)),
]
"""New tokens of a request, query heads of a KV head, head dimension."""
TOLERANCE = 2e-5
"""Of outputs."""


def rule_of(num_sink: int, window_size: int, cells: int, dense_below: int = 0) -> SelectionPolicy:
    tiles = SelectionPolicy(num_sink, window_size, top_k=1, dense_below=dense_below)
    return tiles.by_records(2 * cells)


class Problem:
    """Decodes over pages in random order, unwritten keys NaN and records 255."""

    def __init__(
        self,
        lengths: list[int],
        *,
        queries: int = 1,
        heads: int = 2,
        group: int = 4,
        dim: int = 64,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        together: bool = True,
        zeros: slice = slice(0),
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.scale = 2.0 * dim**-0.5
        counts = [math.ceil(length / page_size) for length in lengths]
        pages = sum(counts) + 2
        rows = torch.full((pages, heads, page_size, 2 * dim), math.nan).to(dtype)
        if together:
            self.k_cache, self.v_cache = rows[..., :dim], rows[..., dim:]
        else:
            apart = torch.full((pages, page_size, heads, dim), math.nan).to(dtype)
            self.k_cache, self.v_cache = apart.transpose(1, 2), rows[..., dim:].clone()
        bytes_of_page = page_size // 64 * record_bytes(dim)
        every = torch.full((pages, 2, heads, bytes_of_page), 255, dtype=torch.uint8)
        self.records = every[:, 1]
        self.keys, self.values, self.slots = [], [], []
        order = torch.randperm(pages, generator=generator)
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        start = 0
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = order[start : start + count]
            table[request, :count] = own
            start += count
            k, v = (torch.randn(length, heads, dim, generator=generator) for _ in "kv")
            k += 3.0 * torch.randn(1, heads, dim, generator=generator)
            k *= torch.randn(dim // 2, generator=generator).mul(0.7).exp().repeat(2)
            k[zeros] = 0.0
            k, v = k.to(dtype), v.to(dtype)
            at = torch.arange(length)
            slots = own[at // page_size] * page_size + at % page_size
            self.k_cache[slots // page_size, :, slots % page_size] = k
            self.v_cache[slots // page_size, :, slots % page_size] = v
            self.keys.append(k.double())
            self.values.append(v.double())
            self.slots.append(slots)
        self.write()
        assert (every[:, 0] == 255).all()
        new = [min(queries, length) for length in lengths]
        offsets = torch.tensor([0, *new]).cumsum(0)
        self.q = torch.randn(int(offsets[-1]), heads * group, dim, generator=generator).to(dtype)
        self.batch = PagedBatch(
            block_table=table,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            cu_seqlens_q=offsets.int(),
            num_decodes=len(lengths),
            num_decode_tokens=int(offsets[-1]),
            decode_query_len=queries,
            max_query_len=queries,
            max_seq_len=max(lengths),
            seq_lens_host=tuple(lengths),
            query_lens_host=tuple(new),
        )

    def write(self) -> None:
        complete = torch.cat([slots[63::64] // 64 for slots in self.slots])
        assert records.supports(self.k_cache, self.records)
        records.write_records(self.k_cache, self.records, complete)

    def fields(self, request: int) -> oracle.Fields:
        """Of a request's complete segments: ``[segments, Hkv, ...]``."""
        dim, page_size = self.k_cache.shape[3], self.k_cache.shape[2]
        ends = self.slots[request][63::64]
        rows = self.records.unflatten(-1, (page_size // 64, -1))
        return oracle.read(rows[ends // page_size, :, ends % page_size // 64], dim)

    def decode(self, rule: SelectionPolicy, sinks: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, math.nan)
        operands = PagedOperands(
            self.q, self.k_cache, self.v_cache, out, self.scale, self.records, sinks
        )
        assert native_decode.supports(operands, self.batch, max(self.batch.query_lens))
        native_decode.decode(operands, self.batch, rule)
        return out

    def expected(
        self, rule: SelectionPolicy, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, and for which tokens and KV heads the choice is sure."""
        heads = self.k_cache.shape[1]
        q = self.q.double().unflatten(1, (heads, -1))
        out, sure = torch.empty_like(q), torch.ones(q.shape[:2], dtype=torch.bool)
        logits = None if sinks is None else sinks.double().view(heads, -1)
        row = 0
        for request, (length, new) in enumerate(
            zip(self.batch.seq_lens_host or (), self.batch.query_lens, strict=True)
        ):
            fields = self.fields(request)
            rows, row = slice(row, row + new), row + new
            first, last = (x // 32 for x in rule.candidate_range(length - new))
            if rule.sees_all(length - new):
                first = last = 0
            for head in range(heads):
                own, keys, entries = q[rows, head], self.keys[request][:, head], []
                if last > first:
                    choice = oracle.choose(
                        own,
                        keys,
                        fields.of(slice(first, None), head),
                        first,
                        last,
                        rule.scored_blocks,
                        self.scale,
                        start_reference(length - new),
                    )
                    (entries,), sure[rows, head] = choice.entries, oracle.sure(choice)
                out[rows, head] = oracle.attend(
                    own,
                    keys,
                    self.values[request][:, head],
                    entries,
                    first,
                    last,
                    self.scale,
                    None if logits is None else logits[head],
                )
        return out.flatten(1, 2), sure

    def check(self, rule: SelectionPolicy, sinks: torch.Tensor | None = None) -> float:
        """Compare the outputs of sure choices; returns their share."""
        heads, found = self.k_cache.shape[1], self.decode(rule, sinks)
        assert not found.isnan().any()
        expected, sure = self.expected(rule, sinks)
        unit = 2.0**-8 * expected.abs() if found.dtype == torch.bfloat16 else 0.0
        wrong = (found.double() - expected).abs() > TOLERANCE + unit
        assert not wrong.unflatten(1, (heads, -1))[sure].any()
        return float(sure.double().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 32, 64, 72, 80, 128, 256, 512])
@pytest.mark.parametrize(("per_page", "together"), [(1, True), (2, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_records_equal_the_oracle(
    kind: str, per_page: int, together: bool, dim: int, dtype: torch.dtype
) -> None:
    """Of the segments that are named alone; K and V side by side, or apart and heads last."""
    count = 12 * per_page
    keys = segments(kind, (count, 2), dim, dtype)
    rows = torch.cat([keys, keys.flip(-1)], -1) if together else keys
    pages = rows.unflatten(0, (12, per_page)).transpose(1, 2).flatten(2, 3)
    if not together:
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    k_cache = pages[..., :dim]
    found = torch.full((12, 2, per_page * record_bytes(dim)), 255, dtype=torch.uint8)
    assert records.supports(k_cache, found)
    named = torch.arange(count - 1, 0, -1)
    records.write_records(k_cache, found, named)
    found = found.unflatten(-1, (per_page, -1)).transpose(1, 2).flatten(0, 1)
    check_decoded(found[named], keys[named])
    assert (found[0] == 255).all()
    differ = found[named] != encode(keys[named])
    assert differ.double().mean() < 0.01


@pytest.mark.parametrize("count", [2, 3])
def test_more_threads_write_and_decode_the_same_bits(count: int) -> None:
    problem = Problem([1500, 900, 3], queries=2, heads=4, page_size=128)
    rule = rule_of(64, 100, 60)
    with threads(1):
        written, found = problem.records.clone(), problem.decode(rule)
    problem.records.fill_(255)
    with threads(count):
        problem.write()
        for _ in range(5):
            assert torch.equal(problem.decode(rule), found)
    assert torch.equal(problem.records, written)


def test_lists_are_those_that_outputs_come_from() -> None:
    """Also where two scores are so near that another list would do."""
    problem, rule = Problem([1500, 900, 3], queries=2, page_size=128), rule_of(64, 100, 60)
    out = torch.full_like(problem.q, math.nan)
    operands = PagedOperands(
        problem.q, problem.k_cache, problem.v_cache, out, problem.scale, problem.records
    )
    lists = native_decode.decode(operands, problem.batch, rule, keeps_lists=True)
    assert lists is not None
    torch.testing.assert_close(out, problem.decode(rule), rtol=0.0, atol=TOLERANCE)
    for request, (length, row) in enumerate(((1500, 0), (900, 2))):
        first, last = (x // 32 for x in rule.candidate_range(length - 2))
        for head in range(2):
            entries = [entry for entry in lists[request, head].tolist() if entry >= 0]
            assert len(entries) > 50
            q = problem.q[row : row + 2].double().unflatten(1, (2, -1))[:, head]
            k, v = (x[request][:, head] for x in (problem.keys, problem.values))
            expected = oracle.attend(q, k, v, entries, first, last, problem.scale, None)
            found = out[row : row + 2].double().unflatten(1, (2, -1))[:, head]
            torch.testing.assert_close(found, expected, rtol=0.0, atol=TOLERANCE)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_nan_is_kept() -> None:
    keys = segments("normal", (2, 1), 64, torch.float32)
    keys[1, 0, 3, 3] = math.nan
    found = torch.empty(2, 1, record_bytes(64), dtype=torch.uint8)
    records.write_records(keys, found, torch.arange(2))
    means = oracle.read(found[:, 0], 64).mean
    assert means.isnan().nonzero().tolist() == [[1, 3]]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_decodes_against_the_oracle(data: st.DataObject) -> None:
    problem = Problem(
        data.draw(st.lists(st.integers(1, 1200), min_size=1, max_size=3)),
        queries=data.draw(st.sampled_from([1, 1, 4])),
        heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.sampled_from([1, 4, 7])),
        dim=data.draw(st.sampled_from([8, 32, 64, 72, 80, 128])),
        page_size=data.draw(st.sampled_from([64, 128, 192])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        together=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    rule = rule_of(
        num_sink=data.draw(st.sampled_from([0, 4, 64, 70])),
        window_size=data.draw(st.sampled_from([1, 64, 100, 130])),
        cells=data.draw(st.integers(1, 150)),
        dense_below=data.draw(st.sampled_from([0, 0, 700])),
    )
    sinks = data.draw(st.sampled_from([None, -1.0, 3.0]))
    with threads(data.draw(st.sampled_from([1, 2]))):
        problem.check(rule, None if sinks is None else torch.full((problem.q.shape[1],), sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize(("queries", "group", "dim"), SHAPES)
def test_most_choices_are_compared(
    group: int, dim: int, page_size: int, queries: int, dtype: torch.dtype
) -> None:
    shape = {"queries": queries, "group": group, "dim": dim, "page_size": page_size, "dtype": dtype}
    problems = [Problem([370, 350, 330], **shape, seed=seed) for seed in range(8)]
    shares = [problem.check(rule_of(64, 100, 40)) for problem in problems]
    assert sum(shares) / len(shares) >= 0.5


def test_cells_of_one_key_are_drawn_evenly() -> None:
    """Scores that are no numbers count as 0: a NaN in a query, or in a key that is far."""
    rule = rule_of(64, 100, 70)
    query, key = Problem([1000]), Problem([1000])
    query.q[0, 1, 3] = math.nan
    slot = int(key.slots[0][400])
    key.k_cache[slot // 64, 0, slot % 64, 7] = math.nan
    key.keys[0][400, 0, 7] = math.nan
    key.write()
    for problem in (query, key):
        found, (expected, sure) = problem.decode(rule), problem.expected(rule)
        assert sure[0, 0]
        torch.testing.assert_close(
            found[0, :4].double(), expected[0, :4], atol=TOLERANCE, rtol=0, equal_nan=True
        )
    assert query.decode(rule)[0, 1].isnan().all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the features are of x86")
@pytest.mark.parametrize("missing", ["avx512vnni", "avx512bw", "avx512f", "avx2"])
@pytest.mark.parametrize("dim", [64, 80])
def test_other_processors(missing: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem([900, 64, 33], dim=dim, group=5)
    rule = rule_of(64, 100, 70)
    here, written = problem.decode(rule), problem.records.clone()
    built: Any = built_without(missing)
    calls = []

    class Counted:
        @staticmethod
        def sparsek_decode(arguments: bytes) -> None:
            calls.append("decode")
            built.sparsek_decode(arguments)

        @staticmethod
        def sparsek_records(arguments: bytes) -> None:
            calls.append("records")
            built.sparsek_records(arguments)

    monkeypatch.setattr(build, "library", Counted)
    torch.testing.assert_close(problem.decode(rule), here, atol=TOLERANCE, rtol=0)
    problem.write()
    assert problem.records.eq(written).double().mean() > 0.99
    assert calls == ["decode", "records"]


def test_other_layouts_take_the_torch_path() -> None:
    problem = Problem([64])
    k = problem.k_cache
    for other in (k.half(), k.mT, k[:, :, :48], k[..., :36]):
        assert not records.supports(other, problem.records)

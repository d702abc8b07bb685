"""The C decode against the oracle and the torch path, and what happens without a compiler."""

from __future__ import annotations

import logging
import math
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import PagedBatch, SelectionPolicy, paged_attention, summary_bytes
from sparsek_kernels.paged.api import write_kv
from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.reference import paged_attention_reference
from sparsek_kernels.paged.sample import CELL_BITS, STEPS, sample_cells, start_of, weight_steps
from tests.kernels.paged.native_builds import built_sample, built_without, needs_compiler


class Problem:
    """Decodes over pages in random order, unwritten rows NaN, K and V side by side or apart."""

    def __init__(
        self,
        lengths: list[int],
        *,
        queries: int = 1,
        heads: int = 2,
        group: int = 3,
        dim: int = 64,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        together: bool = True,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [math.ceil(length / page_size) for length in lengths]
        pages = sum(counts) + 2
        rows = torch.full((pages, heads, page_size, 2 * dim), math.nan).to(dtype)
        if together:
            self.k_cache, self.v_cache = rows[..., :dim], rows[..., dim:]
        else:
            self.k_cache = torch.full((pages, page_size, heads, dim), math.nan).to(dtype)
            self.k_cache = self.k_cache.transpose(1, 2)
            self.v_cache = rows[..., dim:].clone()
        kept = (pages, heads, summary_bytes(page_size, dim))
        self.k_summary = torch.full(kept, 255, dtype=torch.uint8)
        order = torch.randperm(pages, generator=generator)
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        start = 0
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = order[start : start + count]
            table[request, :count] = own
            start += count
            k, v = (torch.randn(length, heads, dim, generator=generator).to(dtype) for _ in "kv")
            at = torch.arange(length)
            slots = own[at // page_size] * page_size + at % page_size
            summary = self.k_summary if page_size % 64 == 0 else None
            write_kv(k, v, self.k_cache, self.v_cache, summary, slots)
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

    def attend(self, policy: SelectionPolicy, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.batch,
            policy,
            k_summary=self.k_summary,
            sinks=sinks,
        )

    def expected(self, policy: SelectionPolicy, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return paged_attention_reference(
            self.q, self.k_cache, self.v_cache, self.batch, policy, sinks=sinks
        )


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_against_the_oracle(data: st.DataObject) -> None:
    """Where nothing is chosen; ``test_native_records`` has the rest."""
    problem = Problem(
        data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=4)),
        queries=data.draw(st.sampled_from([1, 1, 4])),
        heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.sampled_from([1, 3, 4, 16])),
        dim=data.draw(st.sampled_from([16, 64, 80, 128, 256])),
        page_size=data.draw(st.sampled_from([32, 64, 128])),
        together=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    window = data.draw(st.sampled_from([None, 1, 20, 70]))
    policy = SelectionPolicy(
        num_sink=0 if window is None else data.draw(st.integers(0, 70)),
        window_size=window,
        sel_block_size=data.draw(st.sampled_from([16, 32, 64])),
        dense_below=data.draw(st.sampled_from([0, 200])),
    )
    sinks = data.draw(st.sampled_from([None, -1.0, 3.0]))
    logits = None if sinks is None else torch.full((problem.q.shape[1],), sinks)
    operands = PagedOperands(
        problem.q, problem.k_cache, problem.v_cache, problem.q, 1.0, problem.k_summary
    )
    assert native_decode.supports(operands, problem.batch)
    torch.testing.assert_close(
        problem.attend(policy, logits).double(),
        problem.expected(policy, logits),
        atol=2e-5,
        rtol=1e-4,
    )


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_bfloat16_equals_the_torch_path(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem([900, 64, 33], dtype=torch.bfloat16, page_size=64)
    policy = SelectionPolicy(num_sink=64, window_size=100, top_k=3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = problem.attend(policy)
    finally:
        torch.set_num_threads(before)
    exact = problem.expected(policy)
    monkeypatch.setattr(build, "library", lambda: None)
    torch_path = problem.attend(policy)
    assert (found - exact).abs().max() <= 2 * (torch_path - exact).abs().max()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the features are of x86")
@pytest.mark.parametrize("missing", ["avx512bf16", "avx512f"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_processors_without_wide_vectors_or_pairs(
    missing: str, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = built_without(missing)
    calls = 0

    class Counted:
        def sparsek_decode(self, arguments: bytes) -> None:
            nonlocal calls
            calls += 1
            built.sparsek_decode(arguments)

    problem = Problem([900, 129, 33], dim=dim, group=5, dtype=dtype, page_size=64)
    policy = SelectionPolicy(num_sink=64, window_size=100, top_k=3)
    here, exact = problem.attend(policy), problem.expected(policy)
    monkeypatch.setattr(build, "library", Counted)
    found = problem.attend(policy)
    assert calls == 1
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7  # of bfloat16: a unit in the last place
    torch.testing.assert_close(found, here, atol=2e-6, rtol=tolerance)
    torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=max(tolerance, 1e-4))


@needs_compiler
@pytest.mark.parametrize("dim", [33, 64, 80])
def test_bfloat16_outputs_are_the_nearest(dim: int) -> None:
    problem = Problem([300, 20], dim=dim - dim % 8, dtype=torch.bfloat16)
    for name in ("q", "k_cache", "v_cache"):
        x = getattr(problem, name)
        setattr(problem, name, torch.cat([x, x[..., : dim % 8]], dim=-1))
    problem.k_summary = None
    found, exact = problem.attend(SelectionPolicy()), problem.expected(SelectionPolicy())
    half_unit = 2.0 ** (exact.abs().log2().floor() - 8)  # and the error of float32
    assert ((found.double() - exact).abs() <= half_unit + 1e-5).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_outputs_of_any_strides(dtype: torch.dtype) -> None:
    problem = Problem([300, 97], heads=2, group=3, dtype=dtype, page_size=64)
    policy = SelectionPolicy(num_sink=16, window_size=40, top_k=2)
    expected, q = problem.attend(policy), problem.q
    tokens, heads, dim = q.shape
    for shape, order in (((heads, tokens, dim), (1, 0, 2)), ((dim, tokens, heads), (1, 2, 0))):
        problem.q = torch.full(shape, math.nan, dtype=dtype).permute(order).copy_(q)
        assert not problem.q.is_contiguous()
        assert torch.equal(problem.attend(policy), expected)
        out = torch.full(shape, math.nan, dtype=dtype).permute(order)
        k_cache, v_cache, k_summary = problem.k_cache, problem.v_cache, problem.k_summary
        paged_attention(q, k_cache, v_cache, problem.batch, policy, k_summary=k_summary, out=out)
        assert torch.equal(out, expected)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built_sample(tmp_path_factory.mktemp("sample"))


def least_of(places: int) -> int:
    """Cells that are drawn: weights are rounded up to steps, and shares down."""
    return int(places * 2.0 ** (-1 / STEPS)) - 1


@needs_compiler
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_sample_in_c_equals_the_rule(sample: Any, data: st.DataObject) -> None:
    segments, front = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 3))
    places = data.draw(st.integers(1, 32 * segments - 1))
    low, high = sorted(data.draw(st.integers(0, 63)) for _ in range(2))
    middle, width = data.draw(st.floats(0, 63)), data.draw(st.floats(0, 20))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    keys = middle + width * torch.randn(front + segments, 32, generator=generator)
    keys = keys.round().clamp(low, high).to(torch.uint8)
    far = keys[front:].long()
    counts = torch.bincount(far.flatten(), minlength=64)
    position = data.draw(st.integers(0, 1 << 22))
    found = torch.full((places + 1,), -1, dtype=torch.int32)
    ends = (32 * front, 32 * (front + segments), places)
    number = sample(keys.data_ptr(), *ends, position, found.data_ptr())
    assert least_of(places) <= number <= places
    steps = weight_steps(counts, places)
    if not steps.equal(weight_steps(counts.double(), places)):  # rounded to another step
        return
    expected = sample_cells(far, places, start_of(position))
    assert number == int((expected >= 0).sum())
    shifted = torch.where(expected >= 0, expected + 32 * front, -1)
    assert torch.equal(found[:number], shifted[:number])
    weights = found[:number] >> CELL_BITS
    assert torch.equal(weights, steps[keys.flatten()[found[:number] % (1 << CELL_BITS)].long()])


@needs_compiler
def test_a_sample_of_many_cells_ends_in_its_places(sample: Any) -> None:
    """Sums are integers of 32 bits, up to the most places that a list may have."""
    keys = torch.randint(0, 64, (2048, 32), dtype=torch.uint8)
    for key in (keys, torch.full_like(keys, 5), keys // 60 * 60):
        for places in (1, 2, 32767):
            found = torch.full((places + 2,), -7, dtype=torch.int32)
            for position in range(5):
                number = sample(key.data_ptr(), 0, 65536, places, position, found.data_ptr())
                assert least_of(places) <= number <= places
                assert found[places + 1] == -7
                cells = found[:number] % (1 << CELL_BITS)
                assert cells.unique().numel() == number


def test_a_table_of_another_dtype_gives_the_same() -> None:
    problem = Problem([500, 40])
    policy = SelectionPolicy(num_sink=4, window_size=50, top_k=2, sel_block_size=32)
    expected = problem.attend(policy)
    wide = problem.batch.block_table.long()
    problem.batch = replace(problem.batch, block_table=wide, _derived={})
    torch.testing.assert_close(problem.attend(policy), expected, atol=2e-4, rtol=1e-4)


def test_without_a_compiler_the_torch_path_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    build.library.cache_clear()
    try:
        problem = Problem([300, 20])
        policy = SelectionPolicy(num_sink=16, window_size=40, top_k=2, sel_block_size=32)
        with caplog.at_level(logging.WARNING):
            found = problem.attend(policy)
    finally:
        build.library.cache_clear()
    assert "no C compiler" in caplog.text
    torch.testing.assert_close(found.double(), problem.expected(policy), atol=2e-5, rtol=1e-4)


def test_a_compiler_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert build.library() is None
    finally:
        build.library.cache_clear()
    assert "torch path" in caplog.text
    assert "false" in caplog.text


def test_a_user_without_a_home_gets_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", homeless)
    folder = build._cache_folder()
    assert folder.is_dir()
    folder.rmdir()


@pytest.mark.parametrize("changed", ["Features\t: fp asimd", "CPU part\t: 0xd40"])
def test_processors_of_arm_have_libraries_of_their_own(changed: str) -> None:
    """A home folder may be shared by machines of which only some have the instructions."""
    lines = [
        "processor\t: 0",
        "BogoMIPS\t: 243.75",
        "Features\t: fp asimd sve",
        "CPU part\t: 0xd0c",
    ]
    name = changed.split("\t")[0]
    other = [changed if line.startswith(name) else line for line in lines]
    found, others = (build._instructions("\n".join(x) + "\n\nprocessor") for x in (lines, other))
    assert found != others
    assert found == build._instructions("\n".join(["processor\t: 9", "BogoMIPS\t: 1", *lines[2:]]))

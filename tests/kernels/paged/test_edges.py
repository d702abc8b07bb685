"""Layouts, tile sizes and batches at the edge of what paged attention accepts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import PagedBatch, SelectionPolicy, paged_attention, select_blocks
from sparsek_kernels.paged.checks import check_batch_layout
from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.kernels.paged.cache_cases import POLICIES, Case, check, make_case, run

MIXED = ([500, 361, 300, 1, 129], [1, 3, 300, 1, 64], 2)
STRADDLING = [(32, 48), (48, 64), (96, 64), (48, 128), (32, 24), (16, 3), (80, 64), (112, 160)]


@pytest.fixture(params=["native", "torch"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes through the C function (where there is a compiler), then through torch."""
    if request.param == "torch":
        monkeypatch.setattr(build, "library", lambda: None)


def head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("name", ["dense", "sink_window", "topk", "topk_token"])
@pytest.mark.parametrize("layout", ["head_major", "sliced", "backwards"])
def test_strides_of_queries_change_nothing(name: str, layout: str) -> None:
    case = make_case(*MIXED)
    q = {
        "head_major": head_major(case.q),
        "sliced": torch.stack([case.q, case.q + 1], dim=3)[..., 0],
        "backwards": case.q.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    }[layout]
    assert not q.is_contiguous()
    policy = POLICIES[name]
    out = head_major(torch.full_like(case.q, float("nan")))
    paged_attention(
        q, case.k_cache, case.v_cache, case.batch, policy, k_summary=case.k_summary, out=out
    )
    torch.testing.assert_close(out, run(case, policy), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("name", ["dense", "sink_window", "topk"])
@pytest.mark.parametrize("dim", [3, 2, 1])
def test_caches_of_any_strides(name: str, dim: int) -> None:
    policy = POLICIES[name]
    case = make_case(*MIXED)
    case.k_cache, case.v_cache = (
        x.transpose(dim, 3).repeat_interleave(2, dim=3)[..., ::2].transpose(dim, 3)
        for x in (case.k_cache, case.v_cache)
    )
    by_head = case.k_summary.transpose(0, 1).repeat_interleave(dim, dim=1)
    case.k_summary = by_head[:, ::dim].transpose(0, 1)
    check(case, policy)


@pytest.mark.parametrize(("size", "tile"), STRADDLING)
def test_tiles_that_straddle_blocks(size: int, tile: int) -> None:
    policy = SelectionPolicy(
        num_sink=16, window_size=20, top_k=2, sel_block_size=size, query_tile=tile
    )
    check(make_case([420, 400], [420, 170], 0, page_size=16), policy)


def test_a_token_attends_itself_when_its_tile_straddles_blocks() -> None:
    policy = SelectionPolicy(num_sink=64, window_size=64, top_k=3, sel_block_size=192)
    case = make_case([1920], [1920], 0)
    case.q = torch.randn(1920, 4, 32)
    page, row = case.batch.block_table[0, 700 // 64], 700 % 64
    before = run(case, policy)[700]
    case.v_cache[page, :, row] += 1000.0
    assert (run(case, policy)[700] - before).abs().min() > 1e-3


@pytest.mark.parametrize("name", ["topk", "topk_token"])
def test_selection_of_parts(name: str) -> None:
    lengths, queries, num_decodes = [300, 210, 333, 64, 240], [1, 2, 40, 64, 200], 2
    policy = POLICIES[name]
    case = make_case(lengths, queries, num_decodes)
    whole = select_blocks(case.q, case.k_cache, case.batch, policy, k_summary=case.k_summary)
    for first, last in ((0, 2), (2, 3), (3, 5), (2, 5)):
        part = case.batch.part(first, last)
        got = select_blocks(case.q, case.k_cache, part, policy, k_summary=case.k_summary)
        for mine, theirs in zip(got, whole[first:last], strict=True):
            assert torch.equal(mine, theirs)


def chunk(case: Case, begin: int, end: int, decode: bool) -> Case:
    """Tokens ``[begin, end)`` of a one-sequence case, as one step."""
    batch = PagedBatch(
        block_table=case.batch.block_table,
        seq_lens=torch.tensor([end], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
        num_decodes=int(decode),
        num_decode_tokens=end - begin if decode else 0,
        decode_query_len=end - begin if decode else 1,
        max_query_len=end - begin,
        max_seq_len=end,
    )
    return replace(case, q=case.q[begin:end], batch=batch)


@pytest.mark.parametrize("dense_below", [0, 1, 63, 100, 128, 150, 400])
@pytest.mark.parametrize("num_sink", [0, 4])
def test_windows_do_not_depend_on_chunks(dense_below: int, num_sink: int) -> None:
    policy = SelectionPolicy(num_sink=num_sink, window_size=20, dense_below=dense_below)
    case = make_case([230], [230], 0)
    whole = run(case, policy)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, policy)
    torch.testing.assert_close(whole.double(), expected, atol=2e-5, rtol=1e-4)
    cuts = [0, 37, 38, 70, 99, 100, 101, 160, 230]
    for begin, end in pairwise(cuts):
        for decode in (False, True):
            got = run(chunk(case, begin, end, decode), policy)
            torch.testing.assert_close(got, whole[begin:end], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dense_below", [1, 100, 128])
def test_a_window_is_dense_at_the_positions_below(dense_below: int) -> None:
    policy = SelectionPolicy(num_sink=4, window_size=20, dense_below=dense_below)
    for position in range(200):
        attended = position + 1 if position < dense_below else min(position + 1, 24)
        assert policy.attended_tokens(position) == attended, position


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("beyond", [-1, 1 << 30])
@pytest.mark.parametrize("name", [*POLICIES, "topk_over_pages"])
def test_pages_past_a_sequence_are_never_read(name: str, beyond: int) -> None:
    over = SelectionPolicy(num_sink=16, window_size=40, top_k=1, sel_block_size=128)
    policy = POLICIES.get(name, over)
    case = make_case(*MIXED)
    for request, length in enumerate(MIXED[0]):
        case.batch.block_table[request, -(-length // 64) :] = beyond
    check(case, policy)
    if policy.selects_blocks:
        chosen = select_blocks(case.q, case.k_cache, case.batch, policy, k_summary=case.k_summary)
        assert len(chosen) == len(MIXED[0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tile_and_block(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 330), min_size=1, max_size=3))
    queries = [data.draw(st.integers(1, length)) for length in lengths]
    page = data.draw(st.sampled_from([16, 32, 48]))
    size = page * data.draw(st.sampled_from([1, 2, 3]))
    policy = SelectionPolicy(
        num_sink=data.draw(st.integers(0, 40)),
        window_size=data.draw(st.integers(1, 90)),
        top_k=data.draw(st.integers(0, 3)),
        sel_block_size=size,
        dense_below=data.draw(st.sampled_from([0, 50, 100])),
        dense_last=data.draw(st.sampled_from([0, 8])),
        query_tile=data.draw(st.integers(2, 170)),
    )
    case = make_case(lengths, queries, 0, page_size=page, seed=data.draw(st.integers(0, 9)))
    for request, length in enumerate(lengths):
        case.batch.block_table[request, -(-length // page) :] = -1
    if data.draw(st.booleans()):
        case.q = head_major(case.q)
    check(case, policy)


@pytest.mark.parametrize("name", ["topk", "sink_window"])
def test_block_tables_are_left_alone(name: str) -> None:
    case = make_case(*MIXED)
    table = case.batch.block_table.long()
    table[0, -1] = -7  # of no page, past the sequence
    case.batch = replace(case.batch, block_table=table.clone(), _derived={})
    run(case, POLICIES[name])
    assert torch.equal(case.batch.block_table, table)


def test_gpu_kernels_refuse_lengths_that_they_would_misread() -> None:
    batch = make_case(*MIXED).batch
    check_batch_layout(batch)
    for name in ("block_table", "seq_lens", "cu_seqlens_q"):
        spread = torch.stack([getattr(batch, name)] * 2, dim=-1)[..., 0]
        with pytest.raises(NotImplementedError, match=f"{name}: on a GPU the last dimension"):
            check_batch_layout(replace(batch, **{name: spread}, _derived={}))

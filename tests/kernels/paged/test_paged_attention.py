"""The torch path of paged attention against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import (
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    select_blocks,
    write_kv,
)
from sparsek_kernels.paged.cpu.native import build
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.reference import (
    gather_sequence,
    list_logs,
    paged_attention_reference,
    select_blocks_reference,
    visible_reference,
)
from tests.kernels.paged.cache_cases import POLICIES, Case, check, lists_of, make_case, run
from tests.kernels.paged.records_oracle import checked_lists

MIXED = ([500, 361, 300, 1, 129], [1, 3, 300, 1, 64], 2)


@pytest.mark.parametrize("layout", ["interleaved", "token_major"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_matches_oracle(policy: SelectionPolicy | StepPolicy, layout: str) -> None:
    check(make_case(*MIXED, layout=layout), policy)


@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_pages_and_groups(page_size: int, group: int) -> None:
    policy = SelectionPolicy(num_sink=64, window_size=70, top_k=2, query_tile=64)
    case = make_case(
        [450, 391, 64], [1, 391, 33], 1, heads=2 * group, kv_heads=2, page_size=page_size
    )
    sinks = torch.randn(2 * group, generator=torch.Generator().manual_seed(1))
    check(case, policy, sinks=sinks)


@pytest.mark.parametrize("name", ["dense", "sink_window", "topk_dense_below"])
def test_learned_sinks(name: str) -> None:
    check(make_case(*MIXED), POLICIES[name], sinks=torch.tensor([3.0, -2.0, 0.0, 1.0]))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 260), min_size=1, max_size=4))
    queries = [data.draw(st.integers(1, length)) for length in lengths]
    num_decodes = 0
    while num_decodes < len(queries) and queries[num_decodes] <= 3:
        num_decodes += 1
    num_decodes = data.draw(st.integers(0, num_decodes))
    size = data.draw(st.sampled_from([16, 32, 64]))
    policy = SelectionPolicy(
        num_sink=data.draw(st.integers(0, 40)),
        window_size=data.draw(st.integers(1, 90)),
        top_k=data.draw(st.integers(0, 4)),
        sel_block_size=size,
        dense_below=data.draw(st.sampled_from([0, 100])),
        dense_last=data.draw(st.sampled_from([0, 8, 70, 200])),
        query_tile=data.draw(st.sampled_from([2, 16, 64, 128])),
        last_part=data.draw(st.sampled_from([0, 2, 3])),
    )
    case = make_case(lengths, queries, num_decodes, page_size=data.draw(st.sampled_from([16, 64])))
    left = data.draw(st.none() | st.tuples(*[st.integers(-70, 70)] * len(lengths)))
    known = tuple(lengths) if data.draw(st.booleans()) else None
    case.batch = replace(case.batch, prompt_left_host=left, seq_lens_host=known)
    check(case, StepPolicy(policy, SelectionPolicy()))


def check_selection(
    case: Case, queries: list[int], num_decodes: int, policy: SelectionPolicy
) -> None:
    """Every tile's blocks are the oracle's."""
    step = StepPolicy.of(policy)
    lengths = case.batch.seq_lens.tolist()
    chosen = select_blocks(case.q, case.k_cache, case.batch, policy, k_summary=case.k_summary)
    start = 0
    for request, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        rule = step.decode if request < num_decodes else step.prefill
        k = gather_sequence(case.k_cache, case.batch.block_table[request], length)
        first = (length - count) // rule.query_tile
        together = request < num_decodes and rule.alignment > 0
        if together:
            assert len(chosen[request]) == 1
            positions, q = list(range(length - count, length)), case.q[start : start + count]
            expected = select_blocks_reference(q, k, positions, rule, case.q.shape[-1] ** -0.5)
            assert expected is not None
            assert chosen[request][0].tolist() == expected
            start += count
            continue
        assert len(chosen[request]) == rule.num_tiles(length - count, length)
        for tile, rows in enumerate(chosen[request]):
            low = max((first + tile) * rule.query_tile, length - count)
            high = min((first + tile + 1) * rule.query_tile, length)
            positions = list(range(low, high))
            q = case.q[start + low - (length - count) : start + high - (length - count)]
            expected = select_blocks_reference(q, k, positions, rule, case.q.shape[-1] ** -0.5)
            if expected is None:
                assert (rows == -1).all()
            else:
                assert rows.tolist() == expected
        start += count


@pytest.mark.parametrize("query_tile", [2, 32, 64])
def test_selection_equals_oracle(query_tile: int) -> None:
    policy = SelectionPolicy(
        num_sink=16, window_size=20, top_k=3, sel_block_size=32, query_tile=query_tile
    )
    lengths, queries, num_decodes = [600, 210, 333], [2, 190, 333], 1
    case = make_case(lengths, queries, num_decodes)
    check_selection(case, queries, num_decodes, policy)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_selection_equals_oracle(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    queries = [data.draw(st.integers(1, length)) for length in lengths]
    page = data.draw(st.sampled_from([16, 32, 48, 64]))
    kv_heads = data.draw(st.sampled_from([1, 2]))
    policy = SelectionPolicy(
        num_sink=data.draw(st.integers(0, 40)),
        window_size=data.draw(st.integers(1, 90)),
        top_k=data.draw(st.integers(1, 4)),
        sel_block_size=page * data.draw(st.sampled_from([1, 2])),
        dense_below=data.draw(st.sampled_from([0, 100])),
        query_tile=data.draw(st.integers(2, 300)),
    )
    group = data.draw(st.sampled_from([1, 3, 4, 7]))
    case = make_case(lengths, queries, 0, heads=group * kv_heads, kv_heads=kv_heads, page_size=page)
    check_selection(case, queries, 0, policy)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_of_whole_tiles_select_the_same(data: st.DataObject) -> None:
    """Keys after a chunk are in the cache already, as after preemption: none is looked at."""
    tile = data.draw(st.sampled_from([2, 16, 24, 64, 100]))
    policy = SelectionPolicy(
        num_sink=16, window_size=20, top_k=2, sel_block_size=32, query_tile=tile
    )
    length = data.draw(st.integers(1, 420))
    whole = make_case([length], [length], 0, seed=data.draw(st.integers(0, 9)))
    expected = select_blocks(whole.q, whole.k_cache, whole.batch, policy)[0]
    ends = data.draw(st.sets(st.integers(1, length // tile), max_size=4)) if length > tile else ()
    found = []
    for begin, end in pairwise([0, *(tile * n for n in sorted(ends) if tile * n < length), length]):
        batch = batch_of_lengths(whole.batch.block_table, [end - begin], [end])
        found += select_blocks(whole.q[begin:end], whole.k_cache, batch, policy)
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("name", ["topk", "topk_wide_tile"])
def test_keys_past_a_sequence_are_left_out(name: str) -> None:
    case = make_case([300], [120], 0)
    expected = select_blocks(case.q, case.k_cache, case.batch, POLICIES[name])[0]
    page = case.batch.block_table[0, 300 // 64]
    case.k_cache[page, :, 300 % 64 :] = float("nan")
    found = select_blocks(case.q, case.k_cache, case.batch, POLICIES[name])[0]
    assert torch.equal(found, expected)


def test_a_cell_that_one_query_wants_is_found() -> None:
    """There are more places than queries that score: the whole weight of one fills a place."""
    policy = SelectionPolicy(num_sink=32, window_size=32, top_k=22, sel_block_size=32)
    assert policy.scored_blocks > 1.25 * policy.samples  # scores are cut to quarters of octaves
    case = make_case([1500], [40], 0, heads=1, kv_heads=1)
    wanted = 8.0 * torch.nn.functional.normalize(torch.randn(32), dim=0)
    case.q[23] = wanted  # at position 1483, the last of the 4 that it stands for
    case.k_cache[case.batch.block_table[0, 208 // 64], :, 208 % 64 : 224 % 64] = wanted
    chosen = select_blocks(case.q, case.k_cache, case.batch, policy, k_summary=case.k_summary)[0]
    assert 208 // policy.sel_block_size in chosen[0, 0].tolist()


def test_last_queries_of_parts_see_everything() -> None:
    lengths, queries, num_decodes = [300, 210, 333, 64], [1, 190, 40, 64], 1
    case = make_case(lengths, queries, num_decodes)
    policy = SelectionPolicy(
        num_sink=16, window_size=20, top_k=2, sel_block_size=32, query_tile=32, dense_last=10
    )
    whole = run(case, policy)
    for first, last in ((0, 1), (1, 2), (2, 4)):
        part = case.batch.part(first, last)
        rows = slice(sum(queries[:first]), sum(queries[:last]))
        out = torch.zeros_like(whole)
        paged_attention(
            case.q, case.k_cache, case.v_cache, part, policy, k_summary=case.k_summary, out=out
        )
        assert torch.equal(out[rows], whole[rows])
    unknown = replace(case.batch, seq_lens_host=None, query_lens_host=None, _derived={})
    assert torch.equal(run(replace(case, batch=unknown), policy), whole)


@pytest.mark.parametrize(("last", "part"), [(40, 0), (80, 4)])
@pytest.mark.parametrize("ends", [(96, 224, 320), (32, 256, 288, 320), (288, 320, 350)])
def test_chunks_change_nothing_at_the_end_of_a_prompt(
    ends: tuple[int, ...], last: int, part: int
) -> None:
    """The last 40 of 320 tokens, or 80, are dense, in any chunks, and not what follows them."""
    policy = SelectionPolicy(
        num_sink=16,
        window_size=20,
        top_k=2,
        sel_block_size=32,
        query_tile=32,
        dense_last=500 if part else last,
        last_part=part,
    )
    whole = make_case([350], [350], 0)
    whole.batch = replace(whole.batch, prompt_left_host=(-30,))
    expected, got, begin = run(whole, policy), torch.empty_like(whole.q), 0
    for end in ends:
        batch = batch_of_lengths(whole.batch.block_table, [end - begin], [end])
        batch = replace(batch, prompt_left_host=(320 - end,))
        got[begin:end] = run(replace(whole, q=whole.q[begin:end], batch=batch), policy)
        begin = end
    torch.testing.assert_close(got[:begin], expected[:begin], atol=1e-6, rtol=1e-5)
    sparse = run(whole, replace(policy, dense_last=0))
    moved = (expected != sparse).flatten(1).any(1).nonzero().flatten().tolist()
    assert moved == list(range(320 - last, 320))


@pytest.mark.parametrize("records", [False, True], ids=["window", "records"])
def test_a_prompt_may_end_in_a_decode(records: bool) -> None:
    policy = SelectionPolicy(num_sink=64, window_size=64, top_k=2, dense_last=2)
    plain = replace(policy, dense_last=0)
    step = StepPolicy(policy, plain.by_records(64) if records else replace(plain, top_k=0))
    case = make_case([500, 700, 600, 333], [3, 3, 3, 200], 3)
    case.batch = replace(case.batch, prompt_left_host=(0, -7, 1, 0), decode_query_len=3)
    check(case, step)
    unknown = replace(case.batch, prompt_left_host=None, _derived={})
    sparse = run(replace(case, batch=unknown), step)
    moved = (run(case, step) != sparse).flatten(1).any(1).nonzero().flatten().tolist()
    assert moved == [1, 2, 8]


def test_budget_over_context_is_dense() -> None:
    case = make_case(*MIXED)
    policy = SelectionPolicy(num_sink=64, window_size=64, top_k=8)
    assert torch.equal(run(case, policy), run(case, SelectionPolicy()))


@pytest.mark.parametrize("name", ["topk", "sink_window", "topk_token"])
def test_page_permutation_changes_nothing(name: str) -> None:
    first = run(make_case(*MIXED), POLICIES[name])
    second = run(make_case(*MIXED, permute=99), POLICIES[name])
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["dense", "sink_window", "topk_token", "topk"])
def test_chunks_on_tile_boundaries_change_nothing(name: str) -> None:
    policy = POLICIES[name]
    whole = make_case([320], [320], 0)
    expected = run(whole, policy)
    got = torch.empty_like(expected)
    for begin, end in pairwise((0, 32, 96, 224, 320)):
        batch = batch_of_lengths(whole.batch.block_table, [end - begin], [end])
        got[begin:end] = run(replace(whole, q=whole.q[begin:end], batch=batch), policy)
    by_parts = name == "topk_token"  # which are merged in other places
    torch.testing.assert_close(got, expected, atol=1e-5 if by_parts else 1e-6, rtol=1e-5)


def test_prefill_with_tile_one_equals_decodes() -> None:
    policy = POLICIES["topk_token"]
    whole = make_case([200], [200], 0)
    expected = run(whole, policy)
    for position in (17, 63, 64, 150, 199):
        batch = batch_of_lengths(whole.batch.block_table, [1], [position + 1], decodes=1)
        row = replace(whole, q=whole.q[position : position + 1], batch=batch)
        torch.testing.assert_close(run(row, policy)[0], expected[position], atol=1e-6, rtol=1e-5)


def test_padding_slots_are_skipped() -> None:
    case = make_case([40], [1], 1)
    before = case.k_cache.clone()
    slots = torch.tensor([-1, -1], dtype=torch.int64)
    new = torch.randn(2, 2, 32)
    write_kv(new, new, case.k_cache, case.v_cache, case.k_summary, slots)
    assert torch.equal(before.nan_to_num(7.0), case.k_cache.nan_to_num(7.0))


def test_half_precision_within_twice_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decode, "supports", lambda *_: False)  # C may draw another list
    policy = POLICIES["topk"]
    case = make_case(*MIXED, dtype=torch.bfloat16)
    select = checked_lists(lists_of(case, StepPolicy.of(policy)), 1e-4)
    caches = case.k_cache, case.v_cache
    expected = paged_attention_reference(case.q, *caches, case.batch, policy, select=select)
    error = (run(case, policy).double() - expected).abs().max()
    assert error <= 2 * 2**-8 * expected.abs().max() + 1e-3


@pytest.mark.parametrize("page_size", [48, 80, 112])
@pytest.mark.parametrize("name", ["dense", "sink_window", "window"])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_without_selected_blocks_pages_need_not_hold_blocks(
    name: str, page_size: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, case = POLICIES[name], make_case(*MIXED, page_size=page_size)
    if not native:
        monkeypatch.setattr(build, "library", lambda: None)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, case.batch, policy)
    found = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, policy)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_a_batch_of_decodes_may_end_in_padding() -> None:
    case = make_case([100, 60], [1, 1], 2)
    expected = run(case, POLICIES["topk"])
    case.batch = replace(case.batch, num_decode_tokens=5, _derived={})
    case.q = torch.cat([case.q, torch.full((3, *case.q.shape[1:]), float("nan"))])
    assert torch.equal(run(case, POLICIES["topk"])[:2], expected)


def test_attended_tokens_equals_mask() -> None:
    """Of a list, less what places are left over."""
    for policy in POLICIES.values():
        case = make_case([300], [300], 0)
        k = gather_sequence(case.k_cache, case.batch.block_table[0], 300)
        rule, positions = StepPolicy.of(policy).prefill, list(range(300))
        if rule.alignment:
            for position, q in enumerate(case.q):
                entries = select_blocks_reference(q[None], k, [position], rule, 0.2)
                seen, left = torch.tensor([position + 1] * 2), torch.zeros(2)
                if entries is not None:
                    seen = list_logs(entries, position + 1, position, rule).isfinite().sum(-1)
                    left = (torch.tensor(entries) < 0).sum(-1)
                attended = rule.attended_tokens(position) - left * rule.sel_block_size
                assert torch.equal(seen, attended.long()), position
            continue
        empty: dict[int, torch.Tensor] = {}

        def select(q, k, positions, rule, scale, empty=empty):
            entries = select_blocks_reference(q, k, positions, rule, scale)
            left = torch.tensor(entries or [[], []]) < 0  # places of a sample left over
            empty |= dict.fromkeys(positions, left.sum(-1) * rule.sel_block_size)
            return entries

        visible = visible_reference(case.q, k, positions, rule, 0.2, select)
        for position, row in enumerate(visible.sum(-1)):
            seen = row + empty.get(position, 0)
            assert (seen == rule.attended_tokens(position)).all(), (rule, position)

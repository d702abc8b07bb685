"""Prefills by ranked lists of blocks: tables of lists, attention as the oracle has it, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import (
    Indexers,
    PageRecords,
    SelectionPolicy,
    StepPolicy,
    VerticalSlash,
    block_lists,
    paged_attention,
    select_blocks,
)
from sparsek_kernels.paged.index.vertical_slash.lists import listed_blocks
from sparsek_kernels.paged.reference import listed_reference
from tests.kernels.paged.cache_cases import POLICIES, Case, check, make_case, run

MIXED = ([700, 61, 300, 1, 450], [1, 3, 300, 1, 64], 2)
ENTRIES = torch.tensor([[3, -4, 1, -9, 3, 8, -2], [-6, -5, -4, 12, 0, 2, 90]])


def by_lists(lists: torch.Tensor) -> Indexers:
    return Indexers(VerticalSlash(lists), PageRecords())


@settings(max_examples=15, deadline=None)
@given(
    entries=st.integers(0, 9).flatmap(
        lambda n: st.lists(st.lists(st.integers(-25, 25), min_size=n, max_size=n), min_size=2,
                           max_size=2)
    ),
    sinks=st.sampled_from([0, 16, 40]),
    window=st.integers(1, 80),
    top_k=st.integers(1, 9),
    tile=st.sampled_from([8, 16, 48, 64]),
)  # fmt: skip
def test_lists_at_any_length(
    entries: list[list[int]], sinks: int, window: int, top_k: int, tile: int
) -> None:
    policy = SelectionPolicy(sinks, window, top_k, 16, query_tile=tile)
    table = block_lists(torch.tensor(entries, dtype=torch.int64).view(2, -1), policy)
    positions = torch.cat([torch.arange(60), torch.tensor([1000, 100_000])]) * tile
    found = listed_blocks(table, positions, policy)
    assert found.shape[2] == policy.scored_blocks
    select = listed_reference(entries)
    nothing = torch.empty(0)
    for row, position in zip(found.tolist(), positions.tolist(), strict=True):
        wanted = select(nothing, nothing, [position], policy, 1.0)
        assert row == (wanted or [[-1] * policy.scored_blocks] * 2)


@pytest.mark.parametrize("name", ["topk", "topk_wide_tile", "topk_dense_below"])
@pytest.mark.parametrize("dense_last", [0, 70])
def test_attention_matches_the_oracle(name: str, dense_last: int) -> None:
    policy = replace(POLICIES[name], dense_last=dense_last)
    case = make_case(*MIXED)
    indexers = by_lists(block_lists(ENTRIES, policy))
    check(case, policy, select=listed_reference(ENTRIES.tolist()), indexers=indexers)
    found, by_score = run(case, policy, indexers=indexers), run(case, policy)
    decodes = case.batch.num_decode_tokens
    torch.testing.assert_close(found[:decodes], by_score[:decodes])
    assert not torch.allclose(found, by_score)


def test_what_is_listed_can_be_looked_at() -> None:
    policy, case = POLICIES["topk"], make_case(*MIXED)
    lists = block_lists(ENTRIES, policy)
    found = select_blocks(
        case.q,
        case.k_cache,
        case.batch,
        policy,
        k_summary=case.k_summary,
        indexers=by_lists(lists),
    )
    assert found[2].shape == (10, 2, policy.scored_blocks)
    starts = torch.arange(384, 450, policy.query_tile)
    assert torch.equal(found[4], listed_blocks(lists, starts, policy).long())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["topk", "topk_wide_tile", "topk_dense_below"])
def test_kernels_follow_lists(name: str) -> None:
    policy, case = POLICIES[name], make_case(*MIXED, dim=64, page_size=64)
    lists = block_lists(ENTRIES, policy)
    batch = replace(
        case.batch,
        block_table=case.batch.block_table.cuda(),
        seq_lens=case.batch.seq_lens.cuda(),
        cu_seqlens_q=case.batch.cu_seqlens_q.cuda(),
        _derived={},
    )
    tensors = (case.q, case.k_cache, case.v_cache, case.k_summary)
    on_gpu = Case(*(x.contiguous().cuda() for x in tensors), batch)
    found = paged_attention(
        on_gpu.q, on_gpu.k_cache, on_gpu.v_cache, batch, policy,
        k_summary=on_gpu.k_summary, indexers=by_lists(lists.cuda()),
    )  # fmt: skip
    decodes = case.batch.num_decode_tokens
    wanted = run(case, policy, indexers=by_lists(lists))
    torch.testing.assert_close(found.cpu()[decodes:], wanted[decodes:], atol=1e-3, rtol=1e-3)


def test_refusals() -> None:
    policy, case = POLICIES["topk"], make_case(*MIXED)
    lists = block_lists(ENTRIES, policy)
    with pytest.raises(ValueError, match="lists: expected shape"):
        run(case, policy, indexers=by_lists(lists[:, :1]))
    with pytest.raises(TypeError, match=r"lists: expected dtype torch\.int32"):
        run(case, policy, indexers=by_lists(lists.long()))
    token = replace(policy, query_tile=1)
    both = StepPolicy(token, StepPolicy.of(token).decode)
    with pytest.raises(ValueError, match="policy: expected query_tile > 1 with VerticalSlash"):
        run(case, both, indexers=by_lists(block_lists(ENTRIES, token.per_token())))
    with pytest.raises(TypeError, match=r"entries: expected dtype torch\.int32"):
        block_lists(ENTRIES.float(), policy)
    with pytest.raises(ValueError, match="policy: expected top_k >= 1"):
        block_lists(ENTRIES, SelectionPolicy())

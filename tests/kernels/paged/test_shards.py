"""Ranks that hold some pages of every sequence attend, together, what one rank would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsek_kernels.paged import (
    InfLLM,
    PageRecords,
    SelectionPolicy,
    StepPolicy,
    attend_shard,
    merge_shards,
)
from sparsek_kernels.paged.operands import Ranks
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.kernels.paged.cache_cases import POLICIES, Case, make_case
from tests.kernels.paged.record_batches import make_records
from tests.kernels.paged.records_oracle import checked_lists, decode_reference
from tests.kernels.shared_pages import held_pages, on_ranks

LENGTHS, QUERIES = [1, 33, 64, 131, 300, 517], [1, 2, 1, 2, 1, 2]


def attend(
    case: Case, policy: SelectionPolicy | StepPolicy, ranks: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Output and log-sum-exp of every rank, and how often they exchanged scores."""
    caches = (case.k_cache, case.v_cache, case.k_summary)

    def one(rank: int, group: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        (k_cache, v_cache, k_summary), batch = held_pages(caches, case.batch, rank, ranks)
        return attend_shard(
            case.q, k_cache, v_cache, batch, policy, ranks=group, k_summary=k_summary
        )

    return on_ranks(ranks, one)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_merged_attention_is_that_of_one_rank(policy: SelectionPolicy | StepPolicy) -> None:
    case = make_case(LENGTHS, QUERIES, len(LENGTHS))
    sinks = torch.linspace(-1, 2, case.q.shape[1])
    found, calls = attend(case, policy, 3)
    outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
    merged = merge_shards(outs, lses, sinks)
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, policy, sinks=sinks
    )
    torch.testing.assert_close(merged.double(), expected, atol=2e-5, rtol=1e-5)
    assert (calls > 0) == policy.selects_blocks


def test_what_is_refused() -> None:
    case = make_case([64, 80], [1, 20], 1)

    def refused(policy: SelectionPolicy, **changes: object) -> None:
        given = {"k_summary": case.k_summary, **changes}
        attend_shard(case.q, case.k_cache, case.v_cache, case.batch, policy, ranks=None, **given)

    with pytest.raises(ValueError, match="batch: expected decodes alone, got 1 prefills"):
        refused(POLICIES["topk"])
    case.batch = case.batch.part(0, 1)
    with pytest.raises(NotImplementedError, match=r"index: .* not served with InfLLM; keep whole"):
        refused(POLICIES["topk"], index=InfLLM())
    with pytest.raises(ValueError, match="k_summary: expected the page summaries"):
        refused(POLICIES["topk"], k_summary=None)


@pytest.mark.parametrize(("page_size", "new"), [(64, 1), (128, 3)])
def test_by_records_ranks_choose_and_attend_what_one_does(page_size: int, new: int) -> None:
    case = make_records([300, 1217, 900, 70], [new] * 4, page_size=page_size)
    operands = case.operands()
    alone = PageRecords().select(operands, Segment(case.batch, case.policy))
    caches = (case.k_cache, case.v_cache, case.records)
    listed = []

    def one(rank: int, group: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        (k_cache, v_cache, records), batch = held_pages(caches, case.batch, rank, 3)
        held = replace(operands, k_cache=k_cache, v_cache=v_cache, k_summary=records, ranks=group)
        listed.append(PageRecords().select(held, Segment(batch, case.policy)).indices)
        return attend_shard(
            case.q, k_cache, v_cache, batch, case.policy, ranks=group, k_summary=records
        )

    found, calls = on_ranks(3, one)
    assert all(torch.equal(indices, alone.indices) for indices in listed)
    choosing = int((alone.indices[:, 0, 0] >= 0).sum())
    assert calls == 2 * 2 * choosing  # totals and keys, of each token
    sinks = torch.linspace(-1, 2, case.q.shape[1])
    merged = merge_shards(*(torch.stack(parts) for parts in zip(*found, strict=True)), sinks)
    select = checked_lists(alone.indices, 1e-4)
    expected = decode_reference(
        case.q, case.k_cache, case.v_cache, case.batch, case.policy, 64**-0.5, sinks, select
    )
    torch.testing.assert_close(merged.double(), expected, atol=2e-5, rtol=1e-5)

"""Ranks that hold some pages of every sequence attend, together, what one rank would."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels.paged import (
    InfLLM,
    SelectionPolicy,
    StepPolicy,
    attend_shard,
    merge_shards,
)
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.kernels.paged.cache_cases import POLICIES, Case, make_case
from tests.kernels.shared_pages import Largest, held_pages, on_ranks

LENGTHS, QUERIES = [1, 33, 64, 131, 300, 517], [1, 2, 1, 2, 1, 2]


def attend(
    case: Case, policy: SelectionPolicy | StepPolicy, ranks: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Output and log-sum-exp of every rank, and how often they exchanged scores."""
    caches = (case.k_cache, case.v_cache, case.k_summary)

    def one(rank: int, largest: Largest) -> tuple[torch.Tensor, torch.Tensor]:
        (k_cache, v_cache, k_summary), batch = held_pages(caches, case.batch, rank, ranks)
        return attend_shard(
            case.q, k_cache, v_cache, batch, policy, largest=largest, k_summary=k_summary
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
    assert calls == (1 if policy.selects_blocks else 0)


def test_what_is_refused() -> None:
    case = make_case([64, 80], [1, 20], 1)

    def refused(policy: SelectionPolicy, **changes: object) -> None:
        given = {"k_summary": case.k_summary, **changes}
        attend_shard(case.q, case.k_cache, case.v_cache, case.batch, policy, largest=abs, **given)

    with pytest.raises(ValueError, match="batch: expected decodes alone, got 1 prefills"):
        refused(POLICIES["topk"])
    case.batch = case.batch.part(0, 1)
    with pytest.raises(NotImplementedError, match=r"index: .* not served with InfLLM; keep whole"):
        refused(POLICIES["topk"], index=InfLLM())
    with pytest.raises(ValueError, match="k_summary: expected the page summaries"):
        refused(POLICIES["topk"], k_summary=None)

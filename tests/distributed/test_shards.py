"""Decode context parallel ranks attend what one rank does, in decodes and in prefills."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels.paged import StepPolicy
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.distributed import shard_cases
from tests.distributed.group import Ranks
from tests.kernels.paged.cache_cases import POLICIES, lists_of
from tests.kernels.paged.records_oracle import checked_lists


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["sink_window", "topk", "topk_token"])
def test_a_step_of_decodes_and_prefills(name: str, size: int, ranks: Ranks) -> None:
    policy = POLICIES[name]
    case = shard_cases.whole_step(64)
    shares = ranks.run(size, shard_cases.attend, policy, 64, 1000 if size == 2 else 500)
    found = torch.cat([torch.from_numpy(share) for share in shares], dim=1)
    lists = lists_of(case, StepPolicy.of(policy)) if policy.selects_blocks else ()
    expected = paged_attention_reference(
        case.q,
        case.k_cache,
        case.v_cache,
        case.batch,
        policy,
        sinks=shard_cases.sinks(),
        select=checked_lists(lists, 1e-4),
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)

"""Decode context parallel ranks attend what one rank does, in decodes and in prefills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsek_kernels.paged import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.distributed import shard_cases
from tests.distributed.group import Ranks
from tests.kernels.paged.cache_cases import POLICIES
from tests.kernels.paged.records_oracle import decode_reference


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["sink_window", "topk", "topk_token"])
def test_a_step_of_decodes_and_prefills(name: str, size: int, ranks: Ranks) -> None:
    policy = POLICIES[name]
    case = shard_cases.whole_step(32, policy)
    shares = ranks.run(size, shard_cases.attend, policy, 32, 1000 if size == 2 else 500)
    found = torch.cat([torch.from_numpy(share) for share in shares], dim=1)
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, policy, sinks=shard_cases.sinks()
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_by_records(size: int, ranks: Ranks) -> None:
    tiles = POLICIES["topk"]
    assert isinstance(tiles, SelectionPolicy)
    policy = StepPolicy(tiles, replace(tiles, num_sink=64).by_records(32))
    case = shard_cases.whole_step(64, policy)
    shares = ranks.run(size, shard_cases.attend, policy, 64, 1000 if size == 2 else 500)
    found = torch.cat([torch.from_numpy(share) for share in shares], dim=1).double()
    step = case.q, case.k_cache, case.v_cache, case.batch
    expected = paged_attention_reference(*step, tiles, sinks=shard_cases.sinks())
    decodes = case.batch.part(0, case.batch.num_decodes)
    scale = case.q.shape[2] ** -0.5
    expected[: decodes.num_decode_tokens] = decode_reference(
        *step[:3], decodes, policy.decode, scale, shard_cases.sinks()
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)

"""What is counted of keys that ``min_mass`` leaves out, against the oracle's masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsek_kernels.paged import SelectionPolicy, attend_shard
from sparsek_kernels.paged.reference import gather_sequence, visible_reference
from tests.kernels.paged.cache_cases import POLICIES, Case, make_case, run
from tests.kernels.shared_pages import Largest, held_pages, on_ranks

LEAST = POLICIES["topk_least"]
CASES = {
    "equal": LEAST,
    "heads": replace(LEAST, head_top_k=(2, 5)),
    "dense-last": replace(LEAST, dense_last=70),
    "dense-below": replace(LEAST, dense_below=300),
    "fewer-decoded": replace(LEAST, decode_top_k=4),
    "token": replace(LEAST, query_tile=1),
}
LENGTHS, QUERIES, DECODES = [310, 430, 20, 350, 512, 300], [1, 2, 1, 350, 90, 7], 3


def seen(case: Case, policy: SelectionPolicy) -> torch.Tensor:
    """``[2, 2]``: keys seen by the oracle and by position, of prefills and of decodes."""
    found, token = torch.zeros(2, 2, dtype=torch.float64), 0
    for request, (length, new) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        decode = request < DECODES
        rule = policy.per_token() if decode or policy.query_tile == 1 else policy
        k = gather_sequence(case.k_cache, case.batch.block_table[request], length)
        positions = list(range(length - new, length))
        scale = k.shape[-1] ** -0.5
        visible = visible_reference(case.q[token : token + new], k, positions, rule, scale)
        rows = slice(max(new - rule.dense_last, 0))
        most = sum(rule.attended_tokens(position) for position in positions[rows])
        found[int(decode)] += torch.tensor([visible[rows].sum(), most * k.shape[1]])
        token += new
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_counter_is_what_the_oracle_does_not_see(name: str) -> None:
    case, policy = make_case(LENGTHS, QUERIES, DECODES), CASES[name]
    left_out = torch.zeros(2, 2, dtype=torch.int64)
    run(case, policy, left_out=left_out)
    keys, most = seen(case, policy).T
    assert torch.equal(left_out[:, 0].double(), most - keys)
    assert (left_out[:, 0] > 0).all()
    assert (left_out[:, 1] > left_out[:, 0]).all()
    before = left_out.clone()
    run(case, replace(policy, min_mass=0.0), left_out=left_out)
    assert torch.equal(left_out, before)


@pytest.mark.parametrize("sel_block_size", [16, 32])
def test_heads_without_places_leave_nothing_out(sel_block_size: int) -> None:
    # The window's first block takes the only place that a budget of one block has.
    policy = replace(LEAST, sel_block_size=sel_block_size, head_top_k=(1, 1))
    assert policy.head_places == (0, 0)
    case, left_out = make_case([310, 350], [1, 350], 1), torch.zeros(2, 2, dtype=torch.int64)
    run(case, policy, left_out=left_out)
    assert not left_out[0].any()
    assert left_out[1].any() == any(policy.per_token().head_places)


def test_every_rank_counts_the_same() -> None:
    case = make_case(LENGTHS[:3], QUERIES[:3], DECODES)
    caches = (case.k_cache, case.v_cache, case.k_summary)

    def one(rank: int, largest: Largest) -> torch.Tensor:
        (k_cache, v_cache, k_summary), batch = held_pages(caches, case.batch, rank, 2)
        left_out = torch.zeros(2, 2, dtype=torch.int64)
        options = {"largest": largest, "k_summary": k_summary, "left_out": left_out}
        attend_shard(case.q, k_cache, v_cache, batch, LEAST, **options)
        return left_out

    alone = torch.zeros(2, 2, dtype=torch.int64)
    run(case, LEAST, left_out=alone)
    assert alone[1, 0] > 0
    for counted in on_ranks(2, one)[0]:
        assert torch.equal(counted, alone)

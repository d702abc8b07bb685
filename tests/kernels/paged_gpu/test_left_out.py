"""What kernels count of keys that ``min_mass`` leaves out, against the lists that they write."""

from __future__ import annotations

from dataclasses import replace

import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged.launch import attend as launch
from sparsek_kernels.paged.launch.tiles import rows_with_queries
from sparsek_kernels.paged.plan import segments
from sparsek_kernels.paged.policy import SelectionPolicy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAST = SelectionPolicy(
    num_sink=4, window_size=40, top_k=4, sel_block_size=32, query_tile=32, min_mass=0.15
)
POLICIES = {
    "equal": LEAST,
    "heads": replace(LEAST, head_top_k=(2, 4)),
    "dense-last": replace(LEAST, dense_last=20),
    "dense-below": replace(LEAST, dense_below=300),
    "token": replace(LEAST, query_tile=1),
}
LENGTHS = [(1, 301), (2, 290), (1, 20), (45, 350), (9, 305)]


def counted(problem: Problem, policy: SelectionPolicy, invariant: bool = False) -> torch.Tensor:
    """What attending a step adds to a counter."""
    left_out = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    operands = problem.operands(torch.empty_like(problem.q), left_out=left_out)
    if not policy.dense_last:
        launch.paged_attention(operands, problem.batch, policy, batch_invariant=invariant)
        return left_out.cpu()
    for part in segments(problem.batch, policy):
        launch.paged_attention(operands.of_rows(part.rows), part.batch, part.policy)
    return left_out.cpu()


def listed(problem: Problem, policy: SelectionPolicy) -> torch.Tensor:
    """The same, by the lists of every tile and head."""
    given = {"k_summary": problem.k_summary, "softmax_scale": problem.q.shape[-1] ** -0.5}
    found = launch.select_blocks(
        problem.q, problem.k_cache, problem.batch, replace(policy, dense_last=0), **given
    )
    decodes, prefills = (lists.cpu().tolist() for lists in found)
    rows = iter([prefills[row] for row in rows_with_queries(problem.batch, policy)])
    total = torch.zeros(2, 2, dtype=torch.int64)
    for request, (new, length) in enumerate(LENGTHS):
        decode = request < problem.batch.num_decodes
        rule = policy.per_token() if decode else policy
        tiles: dict[int, int] = {}
        for position in range(length - new, length):
            counts = position < length - rule.dense_last
            tile = position // rule.query_tile
            tiles[tile] = tiles.get(tile, 0) + counts
        for tile, queries in tiles.items():
            lists = decodes.pop(0) if decode else next(rows)
            if rule.sees_all(tile * rule.query_tile):
                continue
            for blocks, places in zip(
                lists, rule.head_places or (rule.scored_blocks,) * len(lists), strict=True
            ):
                kept = sum(block >= 0 for block in blocks)
                size = rule.sel_block_size * queries
                total[int(decode)] += torch.tensor([(places - kept) * size, places * size])
    return total


@pytest.mark.parametrize("name", POLICIES)
def test_the_counter_is_the_sum_over_the_lists(name: str) -> None:
    policy = POLICIES[name]
    if policy.query_tile == 1:
        policy = policy.per_token()
    problem = make_problem(LENGTHS, num_decodes=3, page_size=32, device=DEVICE)
    oracle_check.fill(problem)
    found = counted(problem, policy)
    assert torch.equal(found, listed(problem, policy))
    assert (found > 0).all()
    if policy.query_tile == 1:
        alone = counted(problem, policy, invariant=True)
        assert torch.equal(alone, torch.stack([found.sum(0), torch.zeros(2, dtype=torch.int64)]))


def test_without_least_share_nothing_is_counted() -> None:
    problem = make_problem(LENGTHS, num_decodes=3, page_size=32, device=DEVICE)
    oracle_check.fill(problem)
    assert not counted(problem, replace(LEAST, min_mass=0.0, head_top_k=(1, 4))).any()

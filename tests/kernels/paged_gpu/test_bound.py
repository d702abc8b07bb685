"""Decodes that are longer than the host's bound of them: nothing is written past scratch."""

from __future__ import annotations

from dataclasses import replace

import infllm_check
import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import Gates, SelectionPolicy
from sparsek_kernels.paged.launch import attend as launch
from sparsek_kernels.paged.launch import scratch
from sparsek_kernels.paged.launch import seer as launch_seer
from sparsek_kernels.paged.policy import Ranking
from tests.kernels.paged.gate_cases import make_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, BOUND, WIDTH = [1500, 900], 200, 16
"""Lengths on the device, what the host takes for the longest, and the scores of a row for that."""
ROWS = {
    "masses": {"logits": 4},  # of every query head
    "infllm": {"averages": 4 * 2, "scores": 2},  # two averages for each block; of every KV head
    "seer": {"gate logits": 2},
}


def prepare(ranking: Ranking) -> tuple[Problem, Gates | None]:
    problem = make_problem([(1, length) for length in LENGTHS], num_decodes=2, page_size=64,
                           heads=2, group=2, device=DEVICE)  # fmt: skip
    if ranking == "infllm":
        infllm_check.fill(problem)
        return problem, None
    oracle_check.fill(problem)
    if ranking == "masses":
        return problem, None
    gates = make_gates(2, 2, problem.q.shape[2])
    gates = Gates(*(None if x is None else x.to(DEVICE) for x in gates.tensors))
    whole = infllm_check.part_of(problem.batch, [0, 0], LENGTHS, DEVICE)
    launch_seer.write_gate_keys(problem.k_cache, problem.k_summary, whole, 32, gates)
    return problem, gates


@pytest.mark.parametrize("ranking", ROWS)
def test_scores_end_with_their_row(ranking: Ranking, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, gates = prepare(ranking)
    batch = replace(problem.batch, max_seq_len=BOUND, _derived={})
    rule = SelectionPolicy(
        num_sink=32, window_size=40, top_k=3, sel_block_size=32, query_tile=1, ranking=ranking
    )
    monkeypatch.setattr(scratch, "_workspaces", {})

    def select() -> torch.Tensor:
        decodes, _ = launch.select_blocks(
            problem.q, problem.k_cache, batch, rule.per_token(), k_summary=problem.k_summary,
            softmax_scale=0.1, gates=gates,
        )  # fmt: skip
        return decodes

    select()
    for space in scratch._workspaces.values():
        space.fill_(-7)
    chosen = select()
    for (_, name, _), space in scratch._workspaces.items():
        if name in ROWS[ranking]:
            used = len(LENGTHS) * ROWS[ranking][name] * WIDTH
            assert (space[:used] != -7).any()
            assert (space[used:] == -7).all(), name
    assert ((chosen > 0) & (chosen < WIDTH)).all()

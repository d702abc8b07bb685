"""Decodes that are longer than the host's bound of them: nothing is written past scratch."""

from __future__ import annotations

from dataclasses import replace

import infllm_check
import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import Gates, Indexer, InfLLM, Seer, SelectionPolicy, scratch
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.plan import Segment
from tests.kernels.launched import select_launched
from tests.kernels.paged.gate_cases import make_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, BOUND, WIDTH = [1500, 900], 200, 16
"""Lengths on the device, what the host takes for the longest, and the scores of a row for that."""
ROWS = {
    "infllm": {"averages": 4 * 2, "scores": 2},  # two averages for each block; of every KV head
    "seer": {"gate logits": 2},
}


def prepare(name: str) -> tuple[Problem, Indexer]:
    problem = make_problem([(1, length) for length in LENGTHS], num_decodes=2, page_size=64,
                           heads=2, group=2, device=DEVICE)  # fmt: skip
    if name == "infllm":
        infllm_check.fill(problem)
        return problem, InfLLM()
    oracle_check.fill(problem)
    gates = make_gates(2, 2, problem.q.shape[2])
    gates = Gates(*(None if x is None else x.to(DEVICE) for x in gates.tensors))
    whole = infllm_check.part_of(problem.batch, [0, 0], LENGTHS, DEVICE)
    seer_launch.write_gate_keys(problem.k_cache, problem.k_summary, whole, 32, gates)
    return problem, Seer(gates)


@pytest.mark.parametrize("name", ROWS)
def test_scores_end_with_their_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, index = prepare(name)
    batch = replace(problem.batch, max_seq_len=BOUND, _derived={})
    rule = SelectionPolicy(num_sink=32, window_size=40, top_k=3, sel_block_size=32, query_tile=1)
    monkeypatch.setattr(scratch, "_workspaces", {})

    def select() -> torch.Tensor:
        return select_launched(problem.operands(problem.q), Segment(batch, rule), index).indices

    select()
    for space in scratch._workspaces.values():
        space.fill_(-7)
    chosen = select()
    for (_, of, _), space in scratch._workspaces.items():
        if of in ROWS[name]:
            used = len(LENGTHS) * ROWS[name][of] * WIDTH
            assert (space[:used] != -7).any()
            assert (space[used:] == -7).all(), of
    assert ((chosen > 0) & (chosen < WIDTH)).all()

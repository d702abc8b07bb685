"""Decodes that are longer than the host's bound of them: nothing is written past scratch."""

from __future__ import annotations

from dataclasses import replace

import infllm_check
import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import (
    Gates,
    Indexer,
    InfLLM,
    PageRecords,
    Seer,
    SelectionPolicy,
    scratch,
)
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.record import page_bytes
from sparsek_kernels.paged.sample import CELL_BITS
from tests.kernels.launched import select_launched, write_launched
from tests.kernels.paged.gate_cases import make_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, BOUND, WIDTH = [3000, 2500], 200, 16
"""Lengths on the device, what the host takes for the longest, and the scores of a row for that."""
ROWS = {
    "infllm": {"averages": 4 * 2, "scores": 2},  # two averages for each block; of every KV head
    "seer": {"gate logits": 2},
    "records": {"base": 4, "gain": 4, "rest": 4 * 32, "keys": 2 * 32},
}
RULES = dict.fromkeys(
    ("infllm", "seer"),
    SelectionPolicy(num_sink=32, window_size=40, top_k=3, sel_block_size=32, query_tile=1),
)
RULES["records"] = SelectionPolicy(num_sink=64, window_size=64, top_k=3).by_records(64)


def prepare(name: str) -> tuple[Problem, Indexer]:
    problem = make_problem([(1, length) for length in LENGTHS], num_decodes=2, page_size=64,
                           heads=2, group=2, device=DEVICE)  # fmt: skip
    if name == "infllm":
        infllm_check.fill(problem)
        return problem, InfLLM()
    if name == "records":
        records = torch.zeros(
            *problem.k_cache.shape[:2],
            page_bytes(64, problem.q.shape[2]),
            dtype=torch.uint8,
            device=DEVICE,
        )
        for keys, values, slots in zip(problem.keys, problem.values, problem.slots, strict=True):
            write_launched(keys, values, problem.k_cache, problem.v_cache, records, slots)
        problem.k_summary = records
        return problem, PageRecords()
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
    rule = RULES[name]
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
    if name == "records":
        assert (chosen[..., 0] >= 0).all()
        chosen = chosen[chosen >= 0] & ((1 << CELL_BITS) - 1)
    cells = 32 if name == "records" else 1
    assert ((chosen > 0) & (chosen < WIDTH * cells)).all()

"""Sequences that are longer than the host's bound of them: nothing is written past scratch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import infllm_check
import oracle_check
import pytest
import torch
from problems import Problem, make_problem

from sparsek_kernels.paged import (
    CellMeans,
    Gates,
    Indexer,
    InfLLM,
    PageRecords,
    Seer,
    SelectionPolicy,
)
from sparsek_kernels.paged.index.cell_means import launch as cell_means_launch
from sparsek_kernels.paged.index.cell_means import launch_scores
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.page_records import launch as records_launch
from sparsek_kernels.paged.index.page_records import launch_sm80
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.record import page_bytes
from sparsek_kernels.paged.sample import CELL_MASK
from tests.kernels.launched import select_launched, write_launched
from tests.kernels.paged.gate_cases import make_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, BOUND, WIDTH = [3000, 2500], 200, 16
"""Lengths on the device, what the host takes for the longest, and the scores of a row for that."""
GUARD, UNUSED = 1 << 14, -7
LAUNCHERS = (
    *(infllm_launch, seer_launch, records_launch, launch_sm80),
    *(cell_means_launch, launch_scores),
)
WRITTEN = {
    "infllm": {"averages", "shares of averages", "scores"},
    "seer": {"gate queries", "gate logits"},
    "records": {"rest", "base", "gain", "units", "totals", "keys", "key counts"},
    "records by matrix units": {"weights", "tops", "gains", "sums", "counts", "counters"},
    "cell means": {"means", "score state", "parts", "scores"},
    "cell means on Hopper": {
        *("means", "samples", "seen blocks", "scored tiles", "kept weights", "kept maxima"),
        *("parts", "scores"),
    },
}
"""Scratch of each rule; a dtype behind its name is left out."""
RULES = dict.fromkeys(
    ("infllm", "seer"),
    SelectionPolicy(num_sink=32, window_size=40, top_k=3, sel_block_size=32, query_tile=1),
)
RULES |= dict.fromkeys(
    ("records", "records by matrix units"),
    SelectionPolicy(num_sink=64, window_size=64, top_k=3).by_records(64),
)
RULES["cell means"] = replace(RULES["infllm"], query_tile=64)
RULES["cell means on Hopper"] = SelectionPolicy(num_sink=64, window_size=64, top_k=3, query_tile=64)
GPU = {"records by matrix units", "cell means on Hopper"}


def prepare(name: str) -> tuple[Problem, Indexer]:
    prompts, half = name.startswith("cell means"), name in GPU
    shape: dict[str, Any] = {"dim": 64, "dtype": torch.bfloat16} if half else {}
    new = (2000 if half else 70) if prompts else 1
    problem = make_problem(
        [(new, length) for length in LENGTHS],
        num_decodes=0 if prompts else 2,
        page_size=64,
        heads=2,
        group=4 if half else 2,
        device=DEVICE,
        **shape,
    )
    if prompts:
        oracle_check.fill(problem)
        return problem, CellMeans()
    if name == "infllm":
        infllm_check.fill(problem)
        return problem, InfLLM()
    if name.startswith("records"):
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.gpu if name in GPU else ()) for name in WRITTEN],
)
def test_scores_end_with_their_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, index = prepare(name)
    batch = replace(problem.batch, max_seq_len=BOUND, _derived={})
    spaces: dict[str, list[tuple[torch.Tensor, int]]] = defaultdict(list)

    def workspace(device: torch.device, of: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        space = torch.full((numel + GUARD,), UNUSED, device=device, dtype=dtype)
        spaces[of.split(" torch.")[0]].append((space, numel))
        return space

    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "workspace", workspace)
    operands = problem.operands(problem.q)
    chosen = select_launched(operands, Segment(batch, RULES[name]), index).indices
    assert spaces.keys() == WRITTEN[name]
    for of, some in spaces.items():
        for space, used in some:
            assert (space[:used] != UNUSED).any(), of
            assert (space[used:] == UNUSED).all(), of
    cells = 1
    if name.startswith("records"):
        cells = 32
    assert (chosen[..., 0] >= 0).all()
    chosen = chosen[chosen >= 0] & CELL_MASK
    assert ((chosen > 0) & (chosen < WIDTH * cells)).all()

"""What runs beside what: kernels that start early, and streams that share scratch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from aot import KERNELS, learned_launches, record
from hardware import simulated
from oracle_check import fill
from problems import attend_phases, make_problem
from triton import knobs

from sparsek_kernels.paged import SelectionPolicy, paged_attention, scratch
from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.attend.config import decode_config
from sparsek_kernels.paged.config import TileConfig, overlaps
from sparsek_kernels.paged.index.launch import new_selection
from sparsek_kernels.paged.index.page_records import launch as records_launch
from sparsek_kernels.paged.index.page_records.config import uses_matrix_units
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import StepPolicy

LAST = {"cut_cells_kernel", "list_cells_kernel", "top_blocks_kernel"}
"""Kernels that choose: they and those before them have waited for the keys."""
RULE = SelectionPolicy(num_sink=64, window_size=128, top_k=8, sel_block_size=64, query_tile=64)


@pytest.mark.parametrize(("length", "chooses"), [(300, False), (1500, True)])
def test_only_what_follows_a_choice_reads_keys_early(
    length: int, chooses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[bool] = []

    def options(_device: torch.device, allow: bool = True) -> dict[str, bool]:
        allowed.append(allow)
        return {"OVERLAP": False}

    monkeypatch.setattr(attend_launch, "overlap_options", options)
    problem = make_problem([(1, length), (70, length)], num_decodes=1, page_size=64)
    attend_phases(problem.operands(torch.empty_like(problem.q)), problem.batch, RULE)
    assert allowed == [chooses, chooses]


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on a CPU ask for the overlap that they would ask for on a GPU."""
    for module in set(KERNELS.values()):
        if hasattr(module, "overlap_options"):
            options = lambda _device, allowed=True: {"OVERLAP": allowed}  # noqa: E731
            monkeypatch.setattr(module, "overlap_options", options)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("rule", ["means and records", "infllm", "seer"])
def test_attention_that_starts_early_follows_a_kernel_that_has_waited(rule: str) -> None:
    if rule in ("infllm", "seer"):
        seen = learned_launches(rule, 90, torch.bfloat16, 128, 4)
    else:
        problem = make_problem([(1, 3000), (70, 3000)], num_decodes=1, page_size=64)
        operands = problem.operands(torch.empty_like(problem.q))
        policy = StepPolicy(RULE, RULE.by_records(64))
        seen = record(partial(attend_phases, operands, problem.batch, policy), 90, 132)
    early = [
        place
        for place, one in enumerate(seen)
        if one.name == "attend_kernel" and one.kwargs["OVERLAP"]
    ]
    assert early
    for place in early:
        assert place > 0
        assert seen[place - 1].name in LAST


def test_later_gpus_take_nothing_that_is_compiled_for_them_but_has_not_run() -> None:
    archs = (75, 80, 86, 89, 90, 100, 103, 120)
    assert [arch for arch in archs if overlaps(arch)] == [90]
    assert [arch for arch in archs if uses_matrix_units(arch)] == [80, 86, 89, 90]


@pytest.mark.parametrize(("arch", "fits"), [(80, True), (90, True), (100, False)])
def test_products_of_bytes_are_of_gpus_that_have_them(
    arch: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {"dim": 64, "dtype": torch.bfloat16}
    problem = make_problem([(1, 3000)] * 2, num_decodes=2, page_size=64, **shape)
    segment = Segment(problem.batch, RULE.by_records(64))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with simulated(arch, 132):
        call, _ = new_selection(problem.operands(problem.q), segment)
        assert records_launch._fits(call, 64) is fits


@dataclass
class Stream:
    cuda_stream: int
    waited: list[int] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)


def test_streams_take_turns_at_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(1), Stream(2)]
    now: list[Any] = [streams[0], False]
    monkeypatch.setattr(scratch, "_users", {})
    monkeypatch.setattr(scratch, "current_stream", lambda _device: now[0].cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[1])
    for index in (0, 0, 1, 1, 0):
        now[0] = streams[index]
        assert scratch.take_turns(0) == streams[index].cuda_stream
    assert [stream.waited for stream in streams] == [[2], [1]]
    now[:] = streams[1], True  # a captured call waits for nothing that is not captured
    scratch.take_turns(0)
    assert streams[1].waited == [1]


def test_programs_that_share_a_tile_leave_its_ticket_at_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tickets: list[torch.Tensor] = []

    def workspace(device: torch.device, name: str, *size: Any) -> torch.Tensor:
        found = scratch.workspace(device, name, *size)
        tickets.extend([found] * (name == "tickets"))
        return found

    configs: list[int] = []

    def config(**shape: Any) -> TileConfig:
        found = decode_config(**shape)
        configs.append(found.splits)
        return found

    monkeypatch.setattr(attend_launch, "workspace", workspace)
    monkeypatch.setattr(attend_launch, "decode_config", config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = make_problem([(1, 3000)] * 2, num_decodes=2, page_size=64, device=device)
    fill(problem)
    attend_phases(problem.operands(torch.empty_like(problem.q)), problem.batch, SelectionPolicy())
    assert configs[0] > 1
    assert tickets
    assert not any(space.any() for space in tickets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_call_waits_for_one_on_another_stream() -> None:
    problem = make_problem([(1, 3000)] * 4, num_decodes=4, page_size=64, device="cuda")
    fill(problem)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    cache = (problem.k_cache, problem.v_cache)

    def attend(batch: Any) -> torch.Tensor:
        return paged_attention(problem.q, *cache, batch, SelectionPolicy())

    wanted = attend(problem.batch)
    torch.cuda.synchronize()
    for batch in (replace(problem.batch, _derived={}), problem.batch):  # launched, then replayed
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(one):
            torch.cuda._sleep(1 << 30)
            first = attend(batch)
            before.record()
        with torch.cuda.stream(other):
            second = attend(batch)
            after.record()
        torch.cuda.synchronize()
        assert before.elapsed_time(after) > 0
        torch.testing.assert_close(first, wanted, rtol=0, atol=0)
        torch.testing.assert_close(second, wanted, rtol=0, atol=0)

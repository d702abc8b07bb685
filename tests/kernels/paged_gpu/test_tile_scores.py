"""Scores of prefill tiles by means of keys: see ``score_cases.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem
from score_cases import BOUND, HOPPER, PORTABLE, Case, check, policy

from sparsek_kernels.paged.index.cell_means import launch_scores
from sparsek_kernels.paged.index.launch import Scores, new_selection, top_blocks
from sparsek_kernels.paged.index.problem import Step
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.sample_reference import draw_by_scores, list_error, start_reference
from tests.kernels import scripts

ALL = [*PORTABLE, *(case for case in HOPPER if case not in PORTABLE)]
SMALL = Case("small", [(70, 500), (80, 600)], 1, 1, 16)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreted where there is no GPU"
)


@interpreted
@pytest.mark.parametrize("case", PORTABLE, ids=lambda case: case.name)
def test_portable_kernels_agree_with_the_oracle(case: Case) -> None:
    worst, compared = check(case, torch.float32, "cpu")
    assert compared
    assert worst <= BOUND


@interpreted
@pytest.mark.parametrize("limit", ["_MEANS_ELEMENTS", "_PARTS_ELEMENTS"])
def test_some_tiles_with_little_scratch(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_scores, limit, 1)
    worst, compared = check(SMALL, torch.float32, "cpu", 1, 3)
    assert compared
    assert worst <= BOUND


def test_tiles_draw_by_scores() -> None:
    """Of few blocks and many, for which the kernel has paths of their own; one tile sees all."""
    rule = policy(sel_block_size=16, num_sink=16, window_size=32, top_k=9, query_tile=32)
    device, lengths = "cuda" if torch.cuda.is_available() else "cpu", [1000, 272_000, 30_000, 200]
    problem = make_problem([(20, length) for length in lengths], dim=16, device=device)
    call, _ = new_selection(problem.operands(problem.q), Segment(problem.batch, rule))
    assert call.tiles is not None
    call.out.fill_(-7)
    count, heads, _ = call.out.shape
    logits = 2.0 * torch.randn(count, heads, call.width, generator=torch.Generator().manual_seed(4))
    scores = rule.samples * call.group * logits.softmax(-1)
    given = scores.to(device)
    for step in (Step(0, 2), Step(2, count - 2)):
        top_blocks(call, step, Scores(given[step.first :], given.stride()))
    full = 0
    for base, mine, found in zip(call.tiles[:, 1].tolist(), scores, call.out.tolist(), strict=True):
        if rule.sees_all(base):
            full += 1
            assert found == [[-1] * rule.scored_blocks] * heads
            continue
        first, last = rule.candidate_range(base)
        choice = draw_by_scores(
            mine[:, first:last].double(), start_reference(base), rule.scored_blocks, first,
            rule.samples * call.group, order=range(last - first),
        )  # fmt: skip
        assert not any(list_error(choice, head, row, 1e-6) for head, row in enumerate(found))
    assert 0 < full < count


@given(count=st.integers(1, 3000), room=st.integers(0, 3000))
def test_batches_are_of_nearly_one_size(count: int, room: int) -> None:
    step = launch_scores.even_step(count, room)
    assert 1 <= step <= max(room, 1)
    batches = -(-count // step)
    assert batches == -(-count // max(room, 1))
    assert step * batches - count < batches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    worst, compared = check(case, dtype, "cuda")
    assert compared
    assert worst <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.name)
def test_the_kernel_for_hopper_on_the_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles too, which its launcher leaves to the portable kernel."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(launch_scores, "multiprocessors", lambda _device: 3)
    started = []
    launch = launch_scores._score_sm90
    monkeypatch.setattr(
        launch_scores, "_score_sm90", lambda *given: (started.append(1), launch(*given))
    )
    worst, compared = check(case, torch.bfloat16, "cuda")
    assert compared
    assert started
    assert worst <= BOUND


@pytest.mark.parametrize("timing", [[], ["--early"]], ids=["late", "early"])
@pytest.mark.parametrize("order", ["first first", "last first"])
def test_the_kernel_for_hopper_agrees_with_the_oracle(order: str, timing: list[str]) -> None:
    script = Path(__file__).with_name("score_cases.py")
    done = scripts.run(script, "--hopper", "--order", order, *timing)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]

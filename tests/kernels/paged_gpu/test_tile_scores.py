"""Scores of prefill tiles by means of keys: see ``score_cases.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from score_cases import BOUND, HOPPER, PORTABLE, Case, check

from sparsek_kernels.paged.index.two_step import launch_scores
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

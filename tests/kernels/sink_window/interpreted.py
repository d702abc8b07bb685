"""The portable kernels in Triton's interpreter; started by ``test_interpreter.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from sparsek_kernels.sink_window import launch
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig
from sparsek_kernels.sink_window.problem import KeyTerms
from tests.kernels.sink_window.cases import Case, check, check_terms, kernels, make

SMALL = TileConfig(16, 16, 4, 1)
CONFIG = LaunchConfig(SMALL, TileConfig(16, 32, 4, 1), SMALL, SMALL, 16, precision="ieee")
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

CASES = [
    Case(50, 50, 2, 1, 16),
    Case(37, 70, 3, 1, 20, batch=2),
    Case(70, 37, 2, 2, 16, causal=True),
    Case(33, 65, 4, 1, 32, causal=False, sinks=True),
    Case(1, 64, 8, 1, 16, num_sink=4, window=20),
    Case(63, 63, 2, 1, 16, num_sink=20, window=5, sinks=True),
    Case(64, 64, 2, 2, 16, window=1),
    Case(33, 20, 2, 1, 16, num_sink=3, window=2**31 - 1),
    Case(20, 33, 2, 1, 16, window=2**63 - 1),
    Case(40, 40, 2, 1, 16, window=2**31 - 1, num_sink=4),
    Case(40, 20, 2, 1, 16, window=2**31 - 1),
    Case(40, 40, 2, 1, 16, window=7, num_sink=2**31 - 1),
    Case(heads=2, dim=16, window=2**31 - 1, lens=((0, 5), (33, 10), (9, 0), (7, 33))),
    Case(5, 0, 2, 2, 16, sinks=True),
    Case(0, 5, 2, 2, 16, sinks=True),
    Case(48, 48, 2, 1, 16, window=17, num_sink=3, dtype=torch.float16, sinks=True),
    Case(48, 48, 2, 1, 16, window=17, num_sink=3, dtype=torch.bfloat16, sinks=True),
    Case(heads=2, dim=16, lens=((0, 0), (33, 10), (7, 33), (0, 5), (9, 0), (40, 40))),
    Case(heads=2, dim=16, num_sink=4, window=9, sinks=True, lens=((0, 0), (1, 1), (20, 33))),
]


def test_bfloat16_is_rounded_as_on_a_gpu() -> None:
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    between = (halves << 16)[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = between.view(torch.float32)
    found = interpreter._convert_float(x.numpy(), tl.float32, tl.bfloat16, None)
    rounded = torch.from_numpy(found.view("int16")).view(torch.bfloat16)
    torch.testing.assert_close(rounded, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_more_sequences_than_a_grid_has(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    grid, dots = launch.query_grid, launch.row_dots

    def query_grid(shape: Any, *rest: Any) -> Any:
        batches.append(shape.batch)
        return grid(shape, *rest)

    def row_dots(dout: torch.Tensor, *rest: Any) -> torch.Tensor:
        batches.append(len(dout))
        return dots(dout, *rest)

    monkeypatch.setattr(launch, "MOST_SEQUENCES", 2)
    monkeypatch.setattr(launch, "query_grid", query_grid)
    monkeypatch.setattr(launch, "row_dots", row_dots)
    check(Case(20, 20, 2, 1, 16, batch=5, sinks=sinks), config=CONFIG)
    assert set(batches) == {1, 2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    check(case, config=CONFIG)


TERMS = [
    Case(40, 55, 4, 2, 16, batch=2, num_sink=3, window=9, sinks=True),
    Case(48, 48, 2, 1, 20, window=17, dtype=torch.float16),
    Case(33, 70, 2, 1, 16, window=17, num_sink=20, dtype=torch.bfloat16, sinks=True),
    Case(heads=2, dim=16, num_sink=4, window=9, lens=((0, 0), (33, 10), (0, 5), (20, 33))),
]


@pytest.mark.parametrize("case", TERMS, ids=str)
def test_terms_of_sums_are_not_rounded(case: Case) -> None:
    check_terms(case, config=CONFIG)


def test_terms_of_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_SEQUENCES", 2)
    check_terms(Case(20, 20, 2, 1, 16, batch=5), config=CONFIG)


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (9, 0)])
def test_terms_of_nothing_are_zeros(rows: int, keys: int) -> None:
    case = Case(rows, keys, 2, 1, 16, dtype=torch.float32)
    t = make(case)
    slots = torch.arange(keys, dtype=torch.int32)
    terms = KeyTerms(slots, torch.full((2, 1, keys, 1, 16), float("nan")))
    kernels(case, t, CONFIG, terms)
    assert not terms.grads.any()


@SLOW
@given(
    nq=st.integers(1, 70),
    nk=st.integers(1, 70),
    group=st.sampled_from([1, 3]),
    dim=st.sampled_from([16, 24, 40]),
    num_sink=st.integers(0, 40),
    window=st.none() | st.integers(1, 80),
    sinks=st.booleans(),
)
def test_shapes(
    nq: int, nk: int, group: int, dim: int, num_sink: int, window: int | None, sinks: bool
) -> None:
    case = Case(nq, nk, group, 1, dim, num_sink=num_sink, window=window, sinks=sinks)
    check(case, config=CONFIG)


@SLOW
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    num_sink=st.integers(0, 20),
    window=st.none() | st.integers(1, 40),
)
def test_packed_shapes(lens: list[tuple[int, int]], num_sink: int, window: int | None) -> None:
    check(Case(heads=2, dim=16, num_sink=num_sink, window=window, lens=tuple(lens)), config=CONFIG)

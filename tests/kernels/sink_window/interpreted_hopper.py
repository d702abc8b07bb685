"""The Hopper kernels in the interpreter of Gluon; started by ``test_interpreter.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsek_kernels.sink_window import config as configs
from sparsek_kernels.sink_window.config import LaunchConfig, TileConfig, select_config
from tests.kernels.gluon_interpreter import WAYS, Way, in_turn, interpret
from tests.kernels.sink_window.cases import (
    Case,
    check,
    check_terms,
    long_config,
    make,
    problem_of,
)

FORWARD = "sink_window_hopper_fwd_kernel"
BACKWARD = "sink_window_hopper_bwd_kernel"
FEW_ROWS = "sink_window_hopper_small_kernel"
SLOW = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
BF16, FP16 = torch.bfloat16, torch.float16
LENS = ((0, 0), (1, 1), (130, 65), (0, 5), (65, 200), (7, 0), (128, 128), (1, 300))

CASES = [
    Case(330, 330, 4, 2, 64, dtype=BF16),
    Case(256, 256, 2, 1, 64, dtype=BF16, sinks=True),
    Case(193, 193, 2, 2, 64, 2, causal=False, dtype=FP16, sinks=True),
    Case(161, 333, 4, 2, 64, 2, window=67, num_sink=5, dtype=BF16, sinks=True),
    Case(300, 130, 2, 1, 64, window=90, num_sink=20, dtype=BF16),
    Case(384, 384, 2, 1, 64, window=200, dtype=BF16),
    Case(1, 1, 1, 1, 64, window=1, num_sink=1, dtype=BF16, sinks=True),
    Case(1, 257, 3, 1, 64, window=70, num_sink=3, dtype=FP16),
    Case(200, 90, 7, 1, 64, dtype=BF16),
    Case(129, 40, 2, 2, 64, 2, window=300, num_sink=64, dtype=BF16, sinks=True),
    Case(320, 320, 2, 1, 64, window=1, dtype=BF16),
    Case(300, 130, 2, 1, 64, window=2**31 - 1, dtype=BF16),
    Case(520, 520, 1, 1, 64, window=64, num_sink=10, dtype=BF16),
    Case(280, 280, 3, 1, 128, window=100, num_sink=40, dtype=BF16, sinks=True),
    Case(330, 330, 3, 1, 128, window=100, dtype=BF16, sinks=True),
    Case(200, 200, 2, 1, 128, dtype=FP16),
    Case(heads=2, dim=64, dtype=BF16, lens=LENS),
    Case(heads=4, kv_heads=2, dim=64, window=60, num_sink=4, dtype=BF16, sinks=True, lens=LENS),
    Case(heads=2, dim=64, causal=False, dtype=FP16, lens=LENS),
    Case(heads=2, dim=128, window=150, dtype=BF16, sinks=True, lens=LENS),
]
# Tiles of the same tokens of two heads of a group.
PAIRS = [
    Case(40, 40, 2, 1, 128, window=64, dtype=BF16),
    Case(330, 330, 4, 2, 128, 2, window=200, dtype=BF16, sinks=True),
    Case(140, 270, 8, 1, 128, window=130, dtype=FP16),
    Case(161, 90, 4, 1, 128, window=100, dtype=BF16),
    Case(700, 700, 2, 1, 128, window=512, dtype=BF16),
    Case(heads=8, kv_heads=2, dim=128, window=150, dtype=BF16, sinks=True, lens=LENS),
]
FEW = [
    Case(512, 512, 2, 2, 64, causal=False, dtype=FP16),
    Case(200, 300, 4, 2, 64, 2, dtype=BF16, sinks=True),
    Case(77, 450, 2, 1, 64, 2, causal=False, dtype=BF16, sinks=True),
    Case(200, 131, 2, 1, 64, dtype=FP16),
    Case(1, 129, 2, 2, 64, dtype=BF16),
]


def run(case: Case, way: Way, config: LaunchConfig | None = None) -> list[str]:
    """Check both passes of a case; the kernels that were launched."""
    with interpret(*way) as launched:
        check(case, config=config or long_config(case, 90))
    return launched


@pytest.mark.parametrize(("case", "way"), in_turn(CASES), ids=str)
def test_case(case: Case, way: Way) -> None:
    launched = run(case, way)
    assert launched.count(FORWARD) == launched.count(BACKWARD) == 1


@pytest.mark.parametrize("hold_q", [False, True])
@pytest.mark.parametrize(("case", "way"), in_turn(PAIRS), ids=str)
def test_pairs_of_heads(case: Case, way: Way, hold_q: bool) -> None:
    config = long_config(case, 90)
    tile = config.hopper_forward
    assert tile is not None
    assert tile.block_m == 64
    launched = run(case, way, replace(config, hopper_forward=replace(tile, hold_q=hold_q)))
    assert launched.count(FORWARD) == 1


@pytest.mark.parametrize(("case", "way"), in_turn(FEW), ids=str)
def test_few_rows(case: Case, way: Way) -> None:
    t = make(case)
    config = select_config(problem_of(case, t).shape, case.dtype, 90)
    config = replace(config, hopper_backward=TileConfig(64, 128, 8, 3))
    launched = run(case, way, config)
    assert launched.count(FEW_ROWS) == launched.count(BACKWARD) == 1


@pytest.mark.parametrize("case", CASES[2:4], ids=str)
def test_the_accumulator_of_a_part_of_the_heads(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "ACCUMULATOR_BYTES", 1)
    assert run(case, WAYS[0]).count(BACKWARD) == case.batch * case.kv_heads


TERMS = [
    Case(161, 333, 4, 2, 64, 2, window=67, num_sink=5, dtype=BF16, sinks=True),
    Case(200, 200, 2, 1, 128, dtype=FP16),
    Case(heads=4, kv_heads=2, dim=64, window=60, num_sink=4, dtype=BF16, lens=LENS),
]


@pytest.mark.parametrize(("case", "way"), in_turn(TERMS), ids=str)
def test_terms_of_sums_are_not_rounded(case: Case, way: Way) -> None:
    with interpret(*way) as launched:
        check_terms(case, config=long_config(case, 90))
    assert BACKWARD in launched


def test_terms_of_a_part_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "ACCUMULATOR_BYTES", 1)
    with interpret(*WAYS[0]):
        check_terms(TERMS[0], config=long_config(TERMS[0], 90))


@SLOW
@given(
    nq=st.integers(1, 300),
    nk=st.integers(1, 300),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2)]),
    batch=st.integers(1, 2),
    num_sink=st.integers(0, 64),
    window=st.none() | st.integers(1, 200),
    way=st.sampled_from(WAYS),
)
def test_shapes(
    nq: int,
    nk: int,
    heads: tuple[int, int],
    batch: int,
    num_sink: int,
    window: int | None,
    way: Way,
) -> None:
    masks = {"num_sink": num_sink, "window": window, "dtype": BF16}
    assert FORWARD in run(Case(nq, nk, *heads, 64, batch, **masks), way)


@SLOW
@given(
    lens=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=3),
    packed=st.booleans(),
    heads=st.sampled_from([(2, 1), (6, 3), (8, 2)]),
    window=st.integers(1, 200),
    sinks=st.booleans(),
    hold_q=st.booleans(),
    way=st.sampled_from(WAYS),
)
def test_shapes_of_pairs(
    lens: list[tuple[int, int]],
    packed: bool,
    heads: tuple[int, int],
    window: int,
    sinks: bool,
    hold_q: bool,
    way: Way,
) -> None:
    rows, keys = lens[0]
    case = Case(rows + 1, keys + 1, *heads, 64, len(lens), 0, window, True, sinks, BF16)
    if packed:
        case = replace(case, batch=1, lens=tuple(lens))
    tile = TileConfig(64, 64, 4, 2, hold_q)
    run(case, way, replace(long_config(case, 90), hopper_forward=tile))


@SLOW
@given(
    lens=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=4),
    num_sink=st.integers(0, 40),
    window=st.none() | st.integers(1, 150),
    causal=st.booleans(),
    way=st.sampled_from(WAYS),
)
def test_packed_shapes(
    lens: list[tuple[int, int]],
    num_sink: int,
    window: int | None,
    causal: bool,
    way: Way,
) -> None:
    masks = {"num_sink": num_sink, "window": window if causal else None, "causal": causal}
    run(Case(heads=2, dim=64, dtype=BF16, lens=tuple(lens), **masks), way)

"""The kernels in Triton's interpreter; started by ``test_interpreter.py``.

fp16 stands for both half precisions: the interpreter multiplies the raw bits of bf16 tiles.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsek_kernels.block_sparse.config import LaunchConfig, TileConfig
from tests.kernels.block_sparse.cases import Case, check

SLOW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

CASES = [
    Case(80, 80, 2, 1, 16),
    Case(80, 80, 2, 1, 16, causal=True),
    Case(75, 130, 3, 1, 20, batch=2, causal=True),
    Case(130, 75, 4, 2, 16, patterns=2, causal=True),
    Case(100, 140, 4, 2, 32, block=48, patterns=4),
    Case(97, 97, 4, 2, 16, block=32, patterns=2, causal=True, density=1.0),
    Case(64, 64, 4, 2, 16, density=0.0),
    Case(1, 70, 8, 2, 16, causal=True),
    Case(40, 0, 2, 2, 16),
    Case(0, 40, 2, 2, 16),
    Case(200, 200, 2, 1, 16, block=64, causal=True),
    Case(150, 150, 2, 1, 16, block=80, causal=True, density=0.8, dtype=torch.float16),
    Case(50, 60, 2, 1, 16, 2, padded="qk", causal=True),
    Case(90, 75, 2, 1, 20, 2, block=48, padded="k", dropout=0.3),
    Case(70, 60, 2, 1, 16, block=112, patterns=2, padded="q", dropout=0.6, causal=True),
]
WIDE_STEPS = TileConfig(16, 1, 16, 32, 4, 1)
SPLIT = LaunchConfig(WIDE_STEPS, WIDE_STEPS, TileConfig(16, 2, 32, 16, 4, 1), "ieee")
"""A block of queries or keys in shares of 16, against steps that straddle or split blocks."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("block", [16, 48, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_split_and_straddle_blocks(block: int, causal: bool) -> None:
    check(Case(130, 150, 2, 1, 16, block=block, causal=causal), config=SPLIT)


@SLOW
@given(
    nq=st.integers(1, 130),
    nk=st.integers(1, 130),
    heads=st.sampled_from([(1, 1, 1), (3, 1, 1), (4, 2, 2), (4, 2, 4), (4, 4, 2)]),
    dim=st.sampled_from([16, 24, 40]),
    block=st.sampled_from([16, 32, 48]),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    causal=st.booleans(),
)
def test_shapes(
    nq: int,
    nk: int,
    heads: tuple[int, int, int],
    dim: int,
    block: int,
    density: float,
    causal: bool,
) -> None:
    num_heads, kv_heads, patterns = heads
    check(
        Case(
            nq, nk, num_heads, kv_heads, dim, block=block, patterns=patterns, density=density,
            causal=causal,
        )
    )  # fmt: skip

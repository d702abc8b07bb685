"""The Hopper kernel in the interpreter of Gluon; started by ``test_interpreter.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsek_kernels.block_sparse import launch_sm90
from sparsek_kernels.block_sparse.config import ProblemShape, select_config
from sparsek_kernels.block_sparse.structure import offsets_of
from tests.kernels.block_sparse.cases import Case, check
from tests.kernels.gluon_interpreter import WAYS, Way, in_turn, interpret

SLOW = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
BF16, FP16 = torch.bfloat16, torch.float16
FORWARD, DQ = "block_sparse_hopper_fwd_kernel", "block_sparse_hopper_dq_kernel"
DKDV, PARTS = "block_sparse_hopper_dkdv_kernel", "block_sparse_bwd_parts_kernel"

CASES = [
    Case(384, 384, 2, 1, 64, block=128, density=0.7, causal=True, dtype=BF16),
    Case(300, 512, 4, 2, 64, 2, 128, patterns=4, density=0.6, dtype=BF16),
    Case(200, 256, 2, 2, 128, block=128, density=0.8, causal=True, dtype=FP16),
    Case(320, 320, 4, 2, 64, 2, 64, patterns=2, density=0.6, causal=True, dtype=BF16),
    Case(400, 320, 3, 1, 64, block=64, density=0.6, causal=True, dtype=BF16),
    Case(1, 448, 7, 1, 64, block=64, dtype=FP16),
    Case(500, 640, 2, 1, 64, block=64, density=1.0, dtype=BF16),
    Case(192, 192, 2, 1, 128, block=64, density=1.0, causal=True, dtype=BF16),
    Case(256, 256, 2, 1, 64, block=64, density=0.0, dtype=BF16),
]


def run(case: Case, way: Way, **options: int) -> None:
    """Check a case whose passes are the Hopper kernels, the backward ones with ``options``."""
    shape = ProblemShape(case.heads, case.kv_heads, case.dim, case.block, case.patterns, case.nk)
    config = select_config(shape, case.dtype, 90)
    backward = config.hopper_backward
    assert backward is not None
    config = replace(config, hopper_backward=replace(backward, **options))
    with interpret(*way) as launched:
        check(case, config=config)
    assert FORWARD in launched
    backwards = launched[launched.index(DQ) :]
    assert backwards in ([DQ, DKDV], [DQ, DKDV, PARTS])


def test_the_queue_starts_with_long_lists() -> None:
    counts = torch.randint(0, 9, (3, 150), generator=torch.Generator().manual_seed(0))
    queue = torch.full((1 + counts.numel(),), -1, dtype=torch.int32)
    with interpret():
        launch_sm90.block_sparse_queue_kernel[(3, 3)](
            queue, offsets_of(counts), 150, ROWS=64, SCAN=128
        )
    last_first = counts.flip(1).argsort(dim=1, descending=True, stable=True)
    assert queue[0] == 0
    assert torch.equal(queue[1:].view(3, 150), (149 - last_first).to(torch.int32))


@pytest.mark.parametrize(("case", "way"), in_turn(CASES), ids=str)
def test_case(case: Case, way: Way) -> None:
    run(case, way)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_less_in_registers(case: Case) -> None:
    run(case, WAYS[-1], dkdv_held=False)


@pytest.mark.parametrize("least_entries", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_columns_in_parts(case: Case, least_entries: int) -> None:
    run(case, WAYS[1], least_entries=least_entries, shares=64)


@SLOW
@given(
    nq=st.integers(1, 400),
    key_blocks=st.integers(1, 6),
    block=st.sampled_from([(64, 2, 1), (64, 3, 1), (64, 4, 2), (128, 1, 1), (128, 4, 2)]),
    density=st.sampled_from([0.2, 0.6, 1.0]),
    causal=st.booleans(),
    way=st.sampled_from(WAYS),
)
def test_shapes(
    nq: int,
    key_blocks: int,
    block: tuple[int, int, int],
    density: float,
    causal: bool,
    way: Way,
) -> None:
    size, heads, kv_heads = block
    sizes = (nq, size * key_blocks, heads, kv_heads, 64)
    case = Case(*sizes, block=size, density=density, causal=causal, dtype=BF16)
    run(case, way)

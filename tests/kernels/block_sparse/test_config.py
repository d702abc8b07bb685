"""Tile sizes: every shape gets tiles that fit its blocks, and the Hopper kernel what it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_kernels.block_sparse import config
from sparsek_kernels.block_sparse.config import ProblemShape, select_config

HALF, SINGLE = torch.bfloat16, torch.float32


@given(
    group=st.integers(1, 16),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    split=st.sampled_from(["one", "kv", "query", "halves"]),
    dim=st.integers(1, 256),
    block=st.sampled_from(range(16, 129, 16)),
    dtype=st.sampled_from([HALF, torch.float16, SINGLE]),
    arch=st.sampled_from([80, 86, 89, 90, 100, 120]),
)
def test_tiles_fit_blocks_and_patterns(
    group: int,
    kv_heads: int,
    split: str,
    dim: int,
    block: int,
    dtype: torch.dtype,
    arch: int,
) -> None:
    heads = group * kv_heads
    patterns = {"one": 1, "kv": kv_heads, "query": heads, "halves": 2 - heads % 2}[split]
    chosen = select_config(ProblemShape(heads, kv_heads, dim, block, patterns), dtype, arch)
    for tile in (chosen.forward, chosen.dq, chosen.dkdv):
        assert block % tile.rows == tile.rows % 8 == 0
        assert tile.own & (tile.own - 1) == tile.step & (tile.step - 1) == 0
        assert max(16, tile.rows * tile.pack) <= tile.own < 2 * max(16, tile.rows * tile.pack)
        assert min(tile.own, tile.step) >= 16
        assert 1 <= tile.pack <= group
    assert chosen.dkdv.pack == 1
    for tile in (chosen.forward, chosen.dq):
        for first in range(0, heads, group):
            for member in range(0, group, tile.pack):
                served = range(first + member, first + min(member + tile.pack, group))
                assert len({head // (heads // patterns) for head in served}) == 1
    assert (chosen.precision == "ieee") == (dtype == SINGLE)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        (ProblemShape(32, 8, 128, 128, 8, 1024), True),
        (ProblemShape(32, 8, 64, 128, 32, 1024), True),
        (ProblemShape(32, 8, 128, 64, 1, 1024), True),
        (ProblemShape(32, 8, 128, 64, 32, 1024), False),
        (ProblemShape(8, 8, 128, 64, 8, 1024), False),
        (ProblemShape(32, 8, 128, 128, 8, 1000), False),
        (ProblemShape(32, 8, 96, 128, 8, 1024), False),
        (ProblemShape(32, 8, 128, 32, 8, 1024), False),
        (ProblemShape(32, 8, 128, 128, 8, 1024, masked=True), False),
        (ProblemShape(32, 8, 128, 128, 8, 1024, dropout=True), False),
    ],
)
def test_what_the_hopper_kernel_takes(shape: ProblemShape, taken: bool) -> None:
    assert (config.hopper_forward(shape) is not None) == taken
    assert select_config(shape, HALF, 90).hopper_forward == config.hopper_forward(shape)
    assert (config.hopper_backward(shape) is not None) == taken
    assert select_config(shape, HALF, 90).hopper_backward == config.hopper_backward(shape)
    for dtype, arch in ((SINGLE, 90), (HALF, 80), (HALF, 89), (HALF, 100)):
        chosen = select_config(shape, dtype, arch)
        assert chosen.hopper_forward is None
        assert chosen.hopper_backward is None


def test_patterns_across_groups_leave_the_hopper_backward() -> None:
    shape = ProblemShape(6, 3, 128, 128, 2, 1024)
    assert config.hopper_forward(shape) is not None
    assert config.hopper_backward(shape) is None

"""Launch configuration: a pure function that answers for every shape and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_kernels.sink_window.config import ProblemShape, select_config

LONG = ProblemShape(1, 131072, 131072, 32, 8, 128, num_sink=4, window_size=4096)
SMALL = ProblemShape(1, 512, 512, 8, 8, 64, causal=False)


@given(
    dim=st.integers(1, 256),
    num_q=st.integers(1, 1 << 20),
    num_k=st.integers(1, 1 << 20),
    num_sink=st.integers(0, 4096),
    window=st.none() | st.integers(1, 1 << 20),
    heads=st.sampled_from([(1, 1), (8, 1), (28, 4), (64, 8)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    arch=st.sampled_from([70, 75, 80, 86, 89, 90, 100, 103, 120]),
    num_seqs=st.none() | st.integers(1, 64),
)
def test_every_shape_has_a_launchable_configuration(
    dim: int,
    num_q: int,
    num_k: int,
    num_sink: int,
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    arch: int,
    num_seqs: int | None,
) -> None:
    shape = ProblemShape(1, num_q, num_k, *heads, dim, num_sink, window, True, num_seqs)
    config = select_config(shape, dtype, arch)
    assert config == select_config(replace(shape), dtype, arch)
    for tile in (config.forward, config.dkdv, config.dq, config.sink):
        for size in (tile.block_m, tile.block_n, tile.num_warps):
            assert size & (size - 1) == 0
        assert tile.block_m >= 16
        assert tile.block_n >= 16
    if config.hopper_backward is not None:
        # The fused kernel takes every sink key in one block.
        assert config.sink.block_n >= num_sink or window is None
        assert config.sink_block >= num_sink


def test_hopper_kernels_serve_hopper_only() -> None:
    assert select_config(LONG, torch.bfloat16, 90).hopper_forward is not None
    assert select_config(LONG, torch.bfloat16, 90).hopper_backward is not None
    for arch in (80, 86, 89, 100, 120):
        config = select_config(LONG, torch.bfloat16, arch)
        assert config.hopper_forward is None
        assert config.hopper_backward is None


def test_fp32_is_computed_in_fp32() -> None:
    assert select_config(LONG, torch.float32, 90).precision == "ieee"


def test_small_problems_get_small_tiles() -> None:
    config = select_config(SMALL, torch.float16, 90)
    assert config.hopper_forward is None
    assert config.forward.block_m == 64


@pytest.mark.parametrize("sinks", [65, 500])
def test_many_sinks_take_the_portable_kernels(sinks: int) -> None:
    config = select_config(replace(LONG, num_sink=sinks), torch.bfloat16, 90)
    assert config.hopper_forward is None
    assert config.hopper_backward is None

"""Launch configuration: a pure function that answers for every shape and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_kernels.common.alignment import describable
from sparsek_kernels.sink_window.config import ProblemShape, accumulator_parts, select_config

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


def test_short_windows_of_small_heads_take_the_portable_forward_kernel() -> None:
    short = replace(LONG, head_dim=64, window_size=128)
    config = select_config(short, torch.bfloat16, 90)
    assert config.hopper_forward is None
    assert config.forward.block_m == 64
    assert config.hopper_backward is not None
    assert select_config(replace(short, window_size=129), torch.bfloat16, 90).hopper_forward


def test_short_windows_take_narrow_blocks_of_keys_on_hopper() -> None:
    long = replace(LONG, head_dim=128, num_sink=0)
    for window, rows, block in ((512, 64, 64), (513, 128, 128), (None, 128, 128)):
        tile = select_config(replace(long, window_size=window), torch.bfloat16, 90).hopper_forward
        assert tile is not None
        assert (tile.block_m, tile.block_n) == (rows, block)


@given(
    group=st.integers(1, 20),
    dim=st.sampled_from([64, 128]),
    num_sink=st.sampled_from([0, 4, 40]),
    window=st.none() | st.sampled_from([100, 512, 513, 1024, 4096]),
    num_seqs=st.none() | st.integers(1, 64),
)
def test_heads_are_paired_in_even_groups_and_short_windows_without_sinks(
    group: int, dim: int, num_sink: int, window: int | None, num_seqs: int | None
) -> None:
    shape = ProblemShape(1, 65536, 65536, 4 * group, 4, dim, num_sink, window, True, num_seqs)
    tile = select_config(shape, torch.bfloat16, 90).hopper_forward
    paired = group % 2 == 0 and dim == 128 and num_sink == 0 and window in (100, 512)
    assert (tile is not None and tile.block_m == 64) == paired


def test_fp32_is_computed_in_fp32() -> None:
    assert select_config(LONG, torch.float32, 90).precision == "ieee"


def test_small_problems_get_small_tiles() -> None:
    config = select_config(SMALL, torch.float16, 90)
    assert config.hopper_forward is None
    assert config.forward.block_m == 64
    small = config.hopper_small
    assert small is not None
    assert 2 * small.block_n * small.num_stages >= SMALL.num_k
    for other in (
        replace(SMALL, num_k=513),
        replace(SMALL, head_dim=128),
        replace(SMALL, causal=True, window_size=64),
        replace(SMALL, num_seqs=2),
    ):
        assert select_config(other, torch.float16, 90).hopper_small is None
    assert select_config(SMALL, torch.float16, 100).hopper_small is None
    assert select_config(SMALL, torch.float32, 90).hopper_small is None


def test_heads_run_together_while_their_keys_fit_the_cache() -> None:
    causal = replace(LONG, num_sink=0, window_size=None)
    for tokens, together in ((4096, 8), (16384, 4), (32768, 2), (131072, 1)):
        shape = replace(causal, num_q=tokens, num_k=tokens)
        assert select_config(shape, torch.bfloat16, 90).forward_together == together
    assert select_config(LONG, torch.bfloat16, 90).forward_together == 1
    odd = replace(causal, num_q=12000, num_k=12000, num_heads=12, num_kv_heads=6)
    assert select_config(odd, torch.bfloat16, 90).forward_together == 3


@given(
    batch=st.integers(1, 9),
    num_q=st.integers(1, 1 << 20),
    kv_heads=st.integers(1, 40),
    group=st.integers(1, 8),
)
def test_accumulator_parts_cover_every_head_once(
    batch: int, num_q: int, kv_heads: int, group: int
) -> None:
    shape = ProblemShape(batch, num_q, num_q, kv_heads * group, kv_heads, 128)
    seen = [
        (b, h)
        for seqs, heads, kv in accumulator_parts(shape)
        for b in range(batch)[seqs]
        for h in range(kv_heads)[kv]
        if range(kv_heads * group)[heads]
        == range(kv_heads * group)[kv.start * group :][: len(range(kv_heads)[kv]) * group]
    ]
    assert seen == [(b, h) for b in range(batch) for h in range(kv_heads)]
    for seqs, heads, _ in accumulator_parts(shape):
        count = len(range(batch)[seqs])
        part = count * len(range(kv_heads * group)[heads])
        # Rows of several sequences are contiguous only with all their heads.
        assert count == 1 or part == count * kv_heads * group
        assert part * num_q * 512 <= 1 << 29 or part == group


@pytest.mark.parametrize("sinks", [65, 500])
def test_many_sinks_take_the_portable_kernels(sinks: int) -> None:
    config = select_config(replace(LONG, num_sink=sinks), torch.bfloat16, 90)
    assert config.hopper_forward is None
    assert config.hopper_backward is None


def test_the_copy_engine_counts_columns_in_31_bits() -> None:
    """Heads of a long sequence that lie one after the other are too wide a matrix."""
    for tokens, fits in ((1 << 18, True), (1 << 20, False)):
        heads_first = torch.empty(1, 32, tokens, 128, dtype=torch.bfloat16, device="meta")
        assert describable(heads_first.transpose(1, 2)) == fits
        assert describable(heads_first.view(1, tokens, 32, 128))

"""Launch configurations are pure functions of shapes; their invariants hold for any shape."""

from __future__ import annotations

import pytest
import torch
from hardware import simulated
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from sparsek_kernels.paged.attend.config import decode_config, prefill_config, row_config
from sparsek_kernels.paged.attend.launch_sm90 import attend_fits
from sparsek_kernels.paged.config import (
    TileConfig,
    choose_splits,
    largest_part,
    next_power_of_2,
    shared_memory,
    top_warps,
)
from sparsek_kernels.paged.index.cell_means.config import score_bytes, score_config
from sparsek_kernels.paged.index.page_records.config import cut_segments, weigh_shares
from sparsek_kernels.paged.policy import SelectionPolicy

ARCHS = st.sampled_from([75, 80, 86, 89, 90, 100, 120])
SHAPES = {
    "tiles": st.integers(1, 4096),
    "num_kv_heads": st.sampled_from([1, 2, 3, 8, 16]),
    "group": st.integers(1, 16),
    "head_dim": st.sampled_from([64, 80, 96, 128, 256]),
    "arch": ARCHS,
    "num_sms": st.sampled_from([20, 84, 108, 132, 148]),
}
BLOCKS = st.sampled_from([16, 32, 48, 64, 128, 192])


def check_keys(config: TileConfig, sel_block: int) -> None:
    """An iteration takes an equal part of a block, or whole small ones."""
    assert sel_block % config.block_n == 0 or config.block_n % sel_block == 0


def check(config: TileConfig, group: int, least: int = 16) -> None:
    for value in (config.block_h, config.block_m, config.block_n, config.queries):
        assert value == next_power_of_2(value)
    assert config.block_m >= least
    assert config.block_m >= config.queries * config.block_h
    assert config.block_h < 2 * group
    assert config.splits >= 1
    assert config.num_warps in (2, 4, 8, 16)
    assert config.num_warps * 32 * config.max_registers <= 65536


@given(**SHAPES, queries=st.integers(1, 8), blocks=st.integers(1, 16384), sel_block=BLOCKS)
def test_decode(**shape: int) -> None:
    config = decode_config(**shape)
    check(config, shape["group"])
    assert config == decode_config(**shape)
    check_keys(config, shape["sel_block"])
    assert config.queries >= shape["queries"]
    assert config.block_h >= shape["group"]
    assert 1 <= config.splits <= shape["blocks"]


@given(group=SHAPES["group"], head_dim=SHAPES["head_dim"], sel_block=BLOCKS, arch=SHAPES["arch"])
def test_single_rows(**shape: int) -> None:
    config = row_config(**shape)
    check(config, shape["group"])
    assert config.splits == config.queries == 1
    assert config.block_h >= shape["group"]
    check_keys(config, shape["sel_block"])


@given(
    **SHAPES,
    tile=st.sampled_from([1, 16, 48, 64, 128, 256]),
    blocks=st.integers(1, 16384),
    sel_block=BLOCKS,
    itemsize=st.sampled_from([2, 4]),
)
def test_prefill(**shape: int) -> None:
    config = prefill_config(**shape)
    check(config, shape["group"])
    assert shape["tile"] % config.queries == 0
    check_keys(config, shape["sel_block"])


@pytest.mark.parametrize(
    ("tiles", "splits"), [(1, 8), (8, 1), (9, 3), (12, 2), (13, 1), (16, 1), (17, 1), (64, 1)]
)
def test_prefills_are_split_where_that_saves_rounds(tiles: int, splits: int) -> None:
    """Tiles of 64 tokens, 16 programs each: 8 fill an H200's multiprocessors once, 16 twice."""
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "tile": 64, "itemsize": 2}
    rest = {"blocks": 200, "sel_block": 64, "arch": 90, "num_sms": 132}
    assert prefill_config(tiles=tiles, **shape, **rest).splits == splits
    portable = prefill_config(tiles=16, **shape, **rest, fits_hopper=False)
    assert (portable.splits, portable.hopper) == (2, False)


@given(
    tiles=st.integers(1, 2000),
    num_kv_heads=st.integers(1, 16),
    group=st.integers(1, 300),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256, 512]),
    samples=st.integers(1, 16),
    blocks=st.integers(1, 16384),
    itemsize=st.sampled_from([2, 4]),
    arch=ARCHS,
    num_sms=st.sampled_from([20, 132]),
)
def test_scores(**shape: int) -> None:
    config = score_config(**shape)
    check(config, shape["group"])
    assert config.block_m >= config.queries * config.block_h
    assert config.block_n >= 16
    assert config.hopper == (90 <= shape["arch"] < 100)
    row_bytes = next_power_of_2(shape["head_dim"]) * shape["itemsize"]
    needed = score_bytes(config.block_m, config.block_n, config.num_stages, row_bytes)
    assert needed <= shared_memory(shape["arch"])


@given(
    programs=st.integers(0, 10000),
    pieces=st.integers(0, 20000),
    resident=st.integers(1, 1000),
    least=st.integers(1, 3),
)
def test_splits_leave_each_share_some_work(
    programs: int, pieces: int, resident: int, least: int
) -> None:
    splits = choose_splits(programs, pieces, resident, least=least)
    assert splits == 1 or (splits * least <= pieces and splits * programs <= resident)


@given(
    jobs=st.integers(1, 5000),
    segments=st.integers(1, 20000),
    near=st.integers(1, 4),
    columns=st.sampled_from([4, 8, 16]),
    num_sms=st.sampled_from([20, 132]),
)
def test_records_are_read_by_some_programs(
    jobs: int, segments: int, near: int, columns: int, num_sms: int
) -> None:
    programs, at_once = weigh_shares(jobs, segments, near, num_sms)
    assert 1 <= at_once <= programs <= segments
    assert at_once == 1 or jobs * (near + at_once) <= 16 * num_sms
    assert programs == at_once or 40 * at_once < segments
    size = cut_segments(jobs, segments, columns, num_sms)
    assert size in (64, 128, 256, 512)
    assert size * columns <= 4096  # shared memory that a program has without asking for more


def test_small_helpers() -> None:
    assert [largest_part(n, 64) for n in (1, 16, 48, 64, 192, 256)] == [1, 16, 16, 64, 64, 64]
    for blocks in (16, 1024, 4096, 8192, 65536):
        warps, registers = top_warps(blocks)
        assert warps * 32 * registers <= 1 << 16  # a multiprocessor's registers


def test_hoppers_prefill_kernel_writes_what_bulk_copies_can_address() -> None:
    problem = make_problem([(64, 64)], dim=64, dtype=torch.bfloat16)
    tokens, heads, dim = problem.q.shape
    policy = SelectionPolicy(num_sink=64, window_size=64, top_k=1)
    with simulated(90, 132):
        for spare, fits in ((0, True), (8, True), (4, False)):
            out = torch.empty(tokens, heads, dim + spare, dtype=torch.bfloat16)[..., :dim]
            assert attend_fits(problem.operands(out), policy) == fits

"""How the Hopper backward kernel for keys cuts the columns of patterns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from sparsek_kernels.block_sparse import launch_bwd_sm90
from sparsek_kernels.block_sparse.config import ProblemShape, hopper_backward
from sparsek_kernels.block_sparse.launch_bwd_sm90 import plan_columns
from sparsek_kernels.block_sparse.structure import offsets_of


def test_by_hand() -> None:
    ccol = torch.tensor([[0, 5, 5, 6], [6, 8, 11, 13]], dtype=torch.int32)
    ends, columns, num_parts = plan_columns(ccol, 13, 2, all_in_parts=False)
    assert ends.tolist() == [[3, 4, 5, 7, 8, 9], [3, 3, 3, 5, 5, 5]]
    assert columns.tolist() == [0, 0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 6]
    assert num_parts == 12
    ends, _, num_parts = plan_columns(ccol, 13, 2, all_in_parts=True)
    assert ends[0].tolist() == ends[1].tolist() == [3, 4, 5, 7, 8, 9]
    assert num_parts == 12


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    patterns=st.sampled_from([1, 2, 3]),
    most=st.integers(1, 20),
    all_in_parts=st.booleans(),
)
def test_there_is_room_for_every_slot_and_part(
    lengths: list[int], patterns: int, most: int, all_in_parts: bool
) -> None:
    counts = torch.tensor([lengths[p:] + lengths[:p] for p in range(patterns)])
    ccol, total = offsets_of(counts), int(counts.sum())
    ends, columns, num_parts = plan_columns(ccol, total, most, all_in_parts)
    assert ends.dtype == columns.dtype == torch.int32
    assert int(ends[0, -1]) <= columns.numel()
    assert int(ends[1, -1]) <= num_parts
    places = counts.t().flatten()
    for place, slots in enumerate(ends[0].diff(prepend=ends.new_zeros(1)).tolist()):
        assert slots == max(-(-int(places[place]) // most), 1)
        assert int((columns == place).sum()) == slots


@pytest.mark.parametrize(
    ("tokens", "patterns", "batch", "taken"),
    [
        (1 << 15, 32, 1, True),  # 1 GiB of sums, one for each column of each query head
        (1 << 17, 32, 1, False),
        (1 << 15, 32, 4, False),
        (1 << 17, 8, 4, True),  # long columns alone are cut
        (1 << 20, 1, 1, True),
    ],
)
def test_sums_that_find_no_room_leave_the_hopper_backward(
    tokens: int, patterns: int, batch: int, taken: bool
) -> None:
    shape = ProblemShape(32, 8, 128, 128, patterns, tokens)
    columns = tokens // 128
    config = hopper_backward(shape)
    assert config is not None
    problem: Any = SimpleNamespace(
        shape=shape,
        q=torch.empty(batch, tokens, 32, 128, device="meta"),
        ccol_indices=torch.empty(patterns, columns + 1, device="meta"),
        row_indices=torch.empty(patterns * columns * columns // 20, device="meta"),
    )
    with mock.patch.object(launch_bwd_sm90, "multiprocessors", return_value=132):
        assert launch_bwd_sm90.fits(problem, config) == taken

"""The kernel that draws a sample of cells by given keys, against ``sample.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparsek_kernels.paged.index.page_records.kernels.choose import list_cells_kernel
from sparsek_kernels.paged.index.page_records.shapes import Rule, Shape
from sparsek_kernels.paged.sample import KEYS, sample_cells, start_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SINKS, LOCAL = 3, 2, 3  # KV heads; segments
DRAW = torch.Generator().manual_seed(7)
FILLED = 1234567890


def drawn(
    keys: torch.Tensor, places: int, new: int = 1, block: int = 128, sharded: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Lists of the kernel, and those of ``sample.py``.

    Args:
        keys: ``[HEADS, S, 32]`` of far segments.
        places: of a list.
        new: tokens of the request.
        block: cells that the kernel takes at a time.
        sharded: the kernel counts the keys.
    """
    segments = keys.shape[1]
    own, width = SINKS + segments + LOCAL, -(-(SINKS + segments + LOCAL + 1) // 8) * 8
    position = own * 64 + 5
    scratch = torch.full((2, HEADS, width, 32), 77, dtype=torch.int8)
    scratch[1, :, SINKS : SINKS + segments] = keys
    counts = torch.zeros(2, HEADS, KEYS, dtype=torch.int32)
    counts[1] = torch.stack([row.flatten().long().bincount(minlength=KEYS) for row in keys])
    out = torch.full((5, HEADS, places + 3), FILLED, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([9, 9, 0, position + new], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 2, 2, 2 + new], dtype=torch.int32, device=DEVICE)
    list_cells_kernel[2, HEADS](
        out, scratch.to(DEVICE), (counts * (not sharded)).to(DEVICE), lengths, starts,
        0, 2, width, *out.stride()[:2],
        RULE=Rule(SINKS * 32, LOCAL * 32, places, KEYS),
        SHAPE=Shape(new, HEADS, 1, 1, 8, 64, 64, 0), BLOCK=block, SHARDED=sharded, OVERLAP=False,
        num_warps=4,
    )  # fmt: skip
    assert (out[:3] == FILLED).all()
    assert (out[3, :, places:] == FILLED).all()
    if segments * 32 <= places:
        return out[3, :, :places].tolist(), [[-1] * places] * HEADS
    wanted = []
    for head in range(HEADS):
        mine = sample_cells(keys[head].long(), places, start_of(position))
        wanted.append(torch.where(mine >= 0, mine + SINKS * 32, mine).tolist())
    return out[3, :, :places].tolist(), wanted


def normal(spread: float) -> Callable[[int], torch.Tensor]:
    """Keys about the middle."""

    def make(segments: int) -> torch.Tensor:
        keys = torch.randn(HEADS, segments, 32, generator=DRAW) * spread + 30
        return keys.clamp(0, 63).to(torch.int8)

    return make


def heavy(segments: int) -> torch.Tensor:
    """A few cells with most of the probability."""
    keys = torch.randint(0, 6, (HEADS, segments, 32), generator=DRAW)
    keys[:, 1, :3] = 63
    return keys.to(torch.int8)


MADE: dict[str, Callable[[int], torch.Tensor]] = {
    "spread": lambda n: torch.randint(0, 64, (HEADS, n, 32), generator=DRAW).to(torch.int8),
    "narrow": normal(3.0),
    "wide": normal(12.0),
    "heavy": heavy,
    "lowest": lambda n: torch.zeros(HEADS, n, 32, dtype=torch.int8),
    "equal": lambda n: torch.full((HEADS, n, 32), 17, dtype=torch.int8),
    "highest": lambda n: torch.full((HEADS, n, 32), 63, dtype=torch.int8),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["counted", "sharded"])
@pytest.mark.parametrize(("segments", "places"), [(8, 64), (37, 100), (5, 159), (40, 1), (13, 104)])
@pytest.mark.parametrize("name", MADE)
def test_lists_are_those_of_the_rule(name: str, segments: int, places: int, sharded: bool) -> None:
    mine, wanted = drawn(MADE[name](segments), places, sharded=sharded)
    assert mine == wanted
    assert max(max(row) for row in mine) >= 0


@pytest.mark.parametrize("block", [32, 256, 4096])
def test_blocks_of_cells_do_not_change_lists(block: int) -> None:
    mine, wanted = drawn(MADE["wide"](50), 200, new=4, block=block)
    assert mine == wanted


def test_places_are_left_over_where_sums_fall_short() -> None:
    """Where 32 log2 T is rounded up, the shares of all cells do not fill the last places."""
    mine, wanted = drawn(MADE["narrow"](60), 1400)
    assert mine == wanted
    assert all(row[-1] == -1 for row in mine)


@pytest.mark.parametrize(("segments", "places"), [(2, 64), (1, 40), (2, 4096)])
def test_lists_of_tokens_that_see_everything_are_empty(segments: int, places: int) -> None:
    mine, wanted = drawn(MADE["narrow"](segments), places, new=2)
    assert mine == wanted
    assert {entry for row in mine for entry in row} == {-1}


@pytest.mark.gpu
def test_many_places() -> None:
    for name in MADE:
        mine, wanted = drawn(MADE[name](3000), 4096, block=4096)
        assert mine == wanted

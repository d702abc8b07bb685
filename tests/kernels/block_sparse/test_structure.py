"""Index tensors of a pattern: what they mean, their transpose, and what is no structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_kernels.block_sparse.structure import BlockStructure, indices_of_mask


def mask_of(offsets: torch.Tensor, entries: torch.Tensor, width: int) -> torch.Tensor:
    """``[P, rows, width]`` from offsets ``[P, rows + 1]`` and entries, one by one."""
    mask = torch.zeros(offsets.shape[0], offsets.shape[1] - 1, width, dtype=torch.bool)
    for p, row in enumerate(offsets.tolist()):
        for r in range(len(row) - 1):
            for c in entries[row[r] : row[r + 1]].tolist():
                mask[p, r, c] = True
    return mask


def test_by_hand() -> None:
    mask = torch.tensor([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]]]).bool()
    crow, col = indices_of_mask(mask)
    assert crow.tolist() == [[0, 2, 2], [2, 3, 6]]
    assert col.tolist() == [0, 2, 1, 0, 1, 2]
    found = BlockStructure(16, (2, 3), crow, col)
    assert found.ccol_indices.tolist() == [[0, 1, 1, 2], [2, 3, 5, 6]]
    assert found.row_indices.tolist() == [0, 0, 1, 0, 1, 1]
    assert (found.num_patterns, found.num_blocks) == (2, 6)


@given(
    size=st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(0, 9)),
    density=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_rows_and_columns_are_the_same_blocks(
    size: tuple[int, int, int], density: float, seed: int
) -> None:
    mask = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density
    found = BlockStructure(32, size[1:], *indices_of_mask(mask))
    assert torch.equal(mask_of(found.crow_indices, found.col_indices, size[2]), mask)
    assert torch.equal(mask_of(found.ccol_indices, found.row_indices, size[1]), mask.mT)
    for x in (found.crow_indices, found.col_indices, found.ccol_indices, found.row_indices):
        assert x.dtype == torch.int32


def test_index_tensors_of_any_strides() -> None:
    crow, col = torch.zeros(3, 2, dtype=torch.int32).T, ints(0, 9, 2, 9, 1, 9)[::2]
    crow.copy_(ints([0, 1, 2], [2, 2, 3]))
    found = BlockStructure(16, (2, 3), crow, col)
    assert found.crow_indices.is_contiguous()
    assert found.col_indices.is_contiguous()
    assert mask_of(found.crow_indices, found.col_indices, 3).nonzero().tolist() == [
        [0, 0, 0],
        [0, 1, 2],
        [1, 1, 1],
    ]


def test_more_blocks_than_an_int32_counts() -> None:
    rows = 70_000  # 4.9e9 blocks in the grid
    crow = torch.arange(rows + 1, dtype=torch.int32)[None]
    found = BlockStructure(16, (rows, rows), crow, crow[0, :-1].clone())
    assert torch.equal(found.row_indices, found.col_indices)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


FINE: dict[str, Any] = {
    "block_size": 16,
    "shape": (2, 3),
    "crow_indices": ints([0, 2, 3]),
    "col_indices": ints(0, 2, 1),
}
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "block_size: expected an int, got float", {"block_size": 16.0}),
    (TypeError, "block_size: expected an int, got bool", {"block_size": True}),
    (ValueError, "block_size: expected a multiple of 16 from 16 to 128", {"block_size": 24}),
    (ValueError, "block_size: expected a multiple of 16 from 16 to 128", {"block_size": 256}),
    (ValueError, "shape: expected two sizes", {"shape": (2,)}),
    (ValueError, "shape: expected two sizes", {"shape": (2, -1)}),
    (TypeError, "crow_indices: expected a torch.Tensor, got list", {"crow_indices": [[0, 2, 3]]}),
    (
        TypeError,
        "col_indices: expected dtype torch.int32",
        {"col_indices": torch.tensor([0, 2, 1])},
    ),
    (ValueError, r"crow_indices: expected shape \[p", {"crow_indices": ints(0, 2, 3)}),
    (ValueError, r"crow_indices: expected shape \[patterns, 4\]", {"shape": (3, 3)}),
    (ValueError, "col_indices: expected device", {"col_indices": ints(0).to("meta")}),
    (ValueError, "crow_indices: expected offsets", {"crow_indices": ints([1, 2, 3])}),
    (ValueError, "crow_indices: expected offsets", {"crow_indices": ints([0, 4, 3])}),
    (ValueError, "crow_indices: expected offsets", {"crow_indices": ints([0, 1, 2], [1, 2, 3])}),
    (ValueError, "number of col_indices, 3, got 2", {"crow_indices": ints([0, 2, 2])}),
    (ValueError, "expected columns from 0 to 2, got 0 to 3", {"col_indices": ints(0, 3, 1)}),
    (ValueError, "expected columns from 0 to 2, got -1", {"col_indices": ints(0, 2, -1)}),
    (ValueError, "col_indices: expected ascending", {"col_indices": ints(2, 0, 1)}),
    (ValueError, "col_indices: expected ascending", {"col_indices": ints(2, 2, 1)}),
]


@pytest.mark.parametrize(("error", "message", "changes"), REFUSED)
def test_refuses(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    BlockStructure(**FINE)
    with pytest.raises(error, match=message):
        BlockStructure(**{**FINE, **changes})

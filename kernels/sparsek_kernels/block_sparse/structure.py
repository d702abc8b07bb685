"""Which key blocks each query block attends: BSR index tensors and their transpose."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek_kernels.checks import check_tensor

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 128
MAX_BLOCKS = 2**31 // MIN_BLOCK_SIZE
"""Blocks along a side: tokens are counted in 31 bits."""
_INDICES = ("crow_indices", "col_indices", "ccol_indices", "row_indices")


@dataclass(frozen=True, eq=False)
class BlockStructure:
    """The sparsity structure of a block matrix, row by row (CSR) and column by column (CSC).

    There are P patterns over the same R x C grid of blocks; all their entries lie in one list.
    Row ``r`` of pattern ``p`` holds the ascending columns
    ``col_indices[crow_indices[p, r] : crow_indices[p, r + 1]]``.  The transpose, which gradients
    of keys and values need, is computed once, here.

    Args:
        block_size: tokens along a side of a block: 16 to 128, a multiple of 16.
        shape: ``(R, C)``, query and key blocks.
        crow_indices: ``[P, R + 1]`` int32; offsets into ``col_indices``, from 0 to nnz.
        col_indices: ``[nnz]`` int32.

    Attributes:
        ccol_indices: ``[P, C + 1]`` int32; offsets into ``row_indices``.
        row_indices: ``[nnz]`` int32; column ``c`` of pattern ``p`` holds the ascending rows
            ``row_indices[ccol_indices[p, c] : ccol_indices[p, c + 1]]``.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: sizes, offsets or columns that make no such structure.
    """

    block_size: int
    shape: tuple[int, int]
    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    ccol_indices: torch.Tensor = field(init=False)
    row_indices: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        _check_indices(self.shape, self.crow_indices, self.col_indices)
        crow, col = self.crow_indices.contiguous(), self.col_indices.contiguous()
        ccol, rows = _transpose(self.shape, crow, col)
        for name, x in zip(_INDICES, (crow, col, ccol, rows), strict=True):
            object.__setattr__(self, name, x)

    @property
    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The four index tensors, in the order in which operators take them."""
        return self.crow_indices, self.col_indices, self.ccol_indices, self.row_indices

    @property
    def num_patterns(self) -> int:
        """P: 1, or one pattern for each run of ``Hq / P`` query heads."""
        return self.crow_indices.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks over all patterns."""
        return self.col_indices.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the index tensors are."""
        return self.col_indices.device


def check_block_size(block_size: object) -> None:
    """Raise unless ``block_size`` is an integer from 16 to 128 and a multiple of 16."""
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size: expected an int, got {type(block_size).__name__}")
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE or block_size % MIN_BLOCK_SIZE:
        raise ValueError(
            f"block_size: expected a multiple of {MIN_BLOCK_SIZE} from {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE}, got {block_size}"
        )


def structure_of(pattern: Any, num_k: int) -> BlockStructure:
    """``pattern`` itself, or the structure of any object with the BSR attributes.

    Such an object has ``block_size``, ``crow_indices`` (``[P, R + 1]`` or ``[R + 1]``) and
    ``col_indices``; its structure is built once per ``crow_indices`` tensor, and at every call for
    tensors made in inference mode.

    Args:
        num_k: keys of the call, from which the number of key blocks follows.

    Raises:
        TypeError: an attribute is missing.
    """
    if isinstance(pattern, BlockStructure):
        return pattern
    for name in ("block_size", "crow_indices", "col_indices"):
        if not hasattr(pattern, name):
            raise TypeError(
                "pattern: expected a BlockSparsePattern, or block_size, crow_indices and "
                f"col_indices, got {type(pattern).__name__} without {name}"
            )
    check_block_size(pattern.block_size)
    crow, col = pattern.crow_indices, pattern.col_indices
    for name, x in (("crow_indices", crow), ("col_indices", col)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    columns = -(-num_k // pattern.block_size)
    if crow.is_inference() or col.is_inference():  # their changes are not recorded
        return _structure(pattern.block_size, columns, crow, col)
    version = (crow._version, col._version, columns, pattern.block_size)
    known = _structures.get(crow)
    if known is None or known[0] != version or known[1] is not col:
        with torch.inference_mode(False):  # what is kept serves training too
            known = (version, col, _structure(pattern.block_size, columns, crow, col))
        _structures[crow] = known
    return known[2]


def _structure(
    block_size: int, columns: int, crow: torch.Tensor, col: torch.Tensor
) -> BlockStructure:
    # A copy, because a value that held its own weak key would keep it alive.
    rows = crow.clone() if crow.dim() == 2 else crow[None].clone()
    return BlockStructure(block_size, (rows.shape[-1] - 1, columns), rows, col)


_Known = tuple[tuple[int, ...], torch.Tensor, BlockStructure]
_structures: MutableMapping[torch.Tensor, _Known] = WeakTensorKeyDictionary()


def _check_indices(shape: object, crow: torch.Tensor, col: torch.Tensor) -> None:
    sizes = shape if isinstance(shape, tuple) and len(shape) == 2 else None
    if sizes is None or any(type(x) is not int or not 0 <= x <= MAX_BLOCKS for x in sizes):
        raise ValueError(
            f"shape: expected two sizes in blocks, up to {MAX_BLOCKS} each, got {shape!r}"
        )
    check_tensor("crow_indices", crow, ("patterns", sizes[0] + 1), (torch.int32,))
    check_tensor("col_indices", col, ("nnz",), (torch.int32,), crow.device)
    if crow.shape[0] == 0:
        raise ValueError("crow_indices: expected at least one pattern, got none")
    host_crow, host_col = crow.cpu(), col.cpu()
    counts = host_crow.diff(dim=1)
    if bool((counts < 0).any()) or not torch.equal(host_crow, offsets_of(counts)):
        raise ValueError(
            "crow_indices: expected offsets that start at 0, never fall and go on from pattern to "
            f"pattern, got {host_crow if crow.numel() <= 64 else 'others'}"
        )
    total = int(counts.sum())
    if total != col.shape[0]:
        raise ValueError(
            f"crow_indices: expected to end at the number of col_indices, {col.shape[0]}, "
            f"got {total}"
        )
    if col.shape[0] == 0:
        return
    low, high = (int(x) for x in host_col.aminmax())
    if low < 0 or high >= sizes[1]:
        raise ValueError(
            f"col_indices: expected columns from 0 to {sizes[1] - 1}, got {low} to {high}"
        )
    key = _entry_rows(host_crow) * sizes[1] + host_col
    if bool((key.diff() <= 0).any()):
        raise ValueError("col_indices: expected ascending columns without repeats in each row")


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """``[P, R + 1]`` int32 offsets into one list of rows that hold ``counts [P, R]`` entries."""
    totals = counts.sum(1)
    first = (totals.cumsum(0) - totals)[:, None]
    return torch.cat([first, first + counts.cumsum(1)], dim=1).to(torch.int32)


def indices_of_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(crow_indices, col_indices)`` of a dense block mask ``[P, R, C]`` bool."""
    return offsets_of(mask.sum(2)), mask.nonzero()[:, 2].to(torch.int32)


def _entry_rows(crow: torch.Tensor) -> torch.Tensor:
    """``[nnz]`` row of every entry, counted on from pattern to pattern."""
    return torch.repeat_interleave(crow.diff(dim=1).flatten().to(torch.int64))


def _transpose(
    shape: tuple[int, int], crow: torch.Tensor, col: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ccol_indices, row_indices)`` of a checked structure."""
    num_patterns, (num_rows, num_cols) = crow.shape[0], shape
    row = _entry_rows(crow)
    column = row // max(num_rows, 1) * num_cols + col
    counts = torch.bincount(column, minlength=num_patterns * num_cols)
    order = torch.argsort(column, stable=True)
    rows = (row % max(num_rows, 1))[order].to(torch.int32)
    return offsets_of(counts.view(num_patterns, num_cols)), rows

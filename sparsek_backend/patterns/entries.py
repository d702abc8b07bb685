"""Index tensors of listed blocks, made without a dense grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsek_kernels.block_sparse.structure import MAX_BLOCKS, offsets_of


def indices_of_entries(
    places: torch.Tensor,
    num_patterns: int,
    shape: tuple[int, int],
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``(crow_indices, col_indices, weights)`` of listed blocks; repeats count once.

    Args:
        places: ``[3, entries]`` int64: pattern, query block and key block of each entry.
        shape: ``(R, C)``, query and key blocks.
        weights: ``[entries]`` fp32; weights of repeats are added.
    """
    rows, cols = shape
    pattern, row, col = places
    key = (pattern * rows + row) * cols + col
    listed, entry = torch.unique(key, return_inverse=True)
    line = listed // max(cols, 1)
    counts = torch.zeros(num_patterns * rows, dtype=torch.int64, device=places.device)
    counts.scatter_add_(0, line, torch.ones_like(line))
    total = None
    if weights is not None:
        total = torch.zeros(listed.shape, dtype=torch.float32, device=places.device)
        total.scatter_add_(0, entry, weights.float())
    columns = (listed % max(cols, 1)).to(torch.int32)
    return offsets_of(counts.view(num_patterns, rows)), columns, total


def places_of_matrix(matrix: Any, sides: tuple[int, int]) -> torch.Tensor:
    """``[2, entries]`` stored blocks (or elements) of a scipy sparse matrix.

    Raises:
        ValueError: indices that are not in the matrix.
    """
    if sides == (1, 1):
        matrix = matrix.tocsr()
    try:
        matrix.check_format(full_check=True)  # its constructors look at no index
    except ValueError as error:
        raise ValueError(f"matrix: expected a valid one, got this: {error}") from error
    counts = torch.as_tensor(matrix.indptr).diff()
    return torch.stack([torch.repeat_interleave(counts), torch.as_tensor(matrix.indices).long()])


def edge_index_of(graph: Any) -> tuple[torch.Tensor, int]:
    """``(edge_index [2, E] int64, nodes)`` of a networkx graph or a scipy sparse matrix.

    Args:
        graph: a networkx graph over the nodes ``0 .. n - 1``, an undirected edge counting both
            ways; or a square scipy sparse matrix whose entry ``(i, j)`` is an edge from i to j.

    Raises:
        TypeError: neither of them.
        ValueError: other nodes, or a matrix that is not square.
    """
    if hasattr(graph, "is_directed"):
        import networkx

        size = graph.number_of_nodes()
        if set(graph.nodes) != set(range(size)):
            raise ValueError(
                f"graph: expected the nodes 0 to {size - 1}, got {list(graph.nodes)[:8]}"
            )
        graph = networkx.to_scipy_sparse_array(graph, nodelist=range(size), weight=None)
    if not hasattr(graph, "tocoo"):
        raise TypeError(
            f"graph: expected a networkx graph or a scipy sparse matrix, got {type(graph).__name__}"
        )
    if graph.shape[0] != graph.shape[1]:
        raise ValueError(f"graph: expected a square matrix, got shape {graph.shape}")
    entries = graph.tocoo()
    source, target = (torch.as_tensor(x, dtype=torch.int64) for x in (entries.row, entries.col))
    return torch.stack([source, target]), int(graph.shape[0])


def pairs_within(pairs: Any, shape: tuple[int, int]) -> torch.Tensor:
    """``[2, edges]`` int64 on the CPU of ``(query block, key block)`` pairs.

    Raises:
        ValueError: an edge is no pair of blocks of the grid.
    """
    pairs = pairs if isinstance(pairs, torch.Tensor) else list(pairs)
    if not len(pairs):
        return torch.zeros(2, 0, dtype=torch.int64)
    index = _integers(pairs)
    if index is None or index.lt(0).any() or index.ge(torch.tensor(shape)).any():
        raise ValueError(
            f"edges: expected pairs of blocks within {shape[0]} x {shape[1]}, "
            f"got {pairs[:4]}{' ...' if len(pairs) > 4 else ''}"
        )
    return index.T


def _integers(pairs: Any) -> torch.Tensor | None:
    """``[edges, 2]`` integers on the CPU, or ``None`` where they are no such pairs."""
    try:
        index = torch.as_tensor(pairs).cpu()
    except (TypeError, ValueError):
        return None
    whole = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    return index.long() if whole and index.dim() == 2 and index.shape[1] == 2 else None


def check_shape(shape: Any) -> tuple[int, int]:
    """``(R, C)``, or a ValueError where it is no pair of sizes."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) != 2 or any(type(n) is not int or not 0 <= n <= MAX_BLOCKS for n in sizes):
        raise ValueError(
            f"shape: expected (query blocks, key blocks), up to {MAX_BLOCKS} each, got {shape!r}"
        )
    return sizes


def check_density(density: float) -> None:
    """Raise unless ``density`` is a number above 0 and up to 1."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density: expected a number above 0 and up to 1, got {density}")


def block_grid(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of each query block among the key blocks ``[R, 1]``, and key blocks ``[1, C]``."""
    rows, cols = check_shape(shape)
    return torch.arange(rows)[:, None] + (cols - rows), torch.arange(cols)[None, :]

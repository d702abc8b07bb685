"""Edges between nodes, and the blocks of a pattern that hold most of them.

``edge_index`` follows PyTorch Geometric: ``[2, E]``, row 0 the source, row 1 the target.  A target
attends its sources, so a target is a query and a source is a key.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sparsek_backend.patterns.entries import check_density
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_kernels.checks import check_int, check_tensor


def adjacency(edge_index: torch.Tensor, num_nodes: int) -> Any:
    """A scipy CSR array ``[nodes, nodes]`` with the number of edges from i to j at ``(i, j)``."""
    from scipy import sparse

    check_edges(edge_index, num_nodes)
    source, target = edge_index.cpu().numpy()
    ones = torch.ones(edge_index.shape[1], dtype=torch.float32).numpy()
    return sparse.coo_array((ones, (source, target)), shape=(num_nodes, num_nodes)).tocsr()


def check_edges(edge_index: torch.Tensor, num_nodes: int) -> None:
    """Raise unless ``edge_index`` is ``[2, E]`` int64 of nodes ``0 .. num_nodes - 1``."""
    check_int("num_nodes", num_nodes, 0)
    check_tensor("edge_index", edge_index, (2, "E"), (torch.int64,))
    if edge_index.numel():
        low, high = (int(x) for x in edge_index.aminmax())
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"edge_index: expected nodes from 0 to {num_nodes - 1}, got {low} to {high}"
            )


def places_in(order: torch.Tensor) -> torch.Tensor:
    """``[N]``: the place of every node in an ``order [N]`` of nodes."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places


def edge_pattern(
    edge_index: torch.Tensor,
    num_nodes: int,
    block_size: int,
    *,
    density: float | None = None,
    order: torch.Tensor | None = None,
) -> BlockSparsePattern:
    """The blocks that hold the most edges; every block's own is among them.

    Edges are counted per block, which gives the weights.  Memory grows with edges and blocks
    listed, never with the grid.

    Args:
        edge_index: ``[2, E]`` int64, from source to target; targets attend their sources.
        num_nodes: N.
        block_size: nodes along a side of a block.
        density: most blocks, as a share of the grid; all blocks with an edge when ``None``.
        order: ``[N]`` nodes in the order in which they are laid out; as numbered when ``None``.

    Raises:
        ValueError: an argument out of range, or a density below one block for each row.
    """
    check_edges(edge_index, num_nodes)
    rows = -(-num_nodes // block_size)
    nodes = edge_index.cpu()
    if order is not None:
        order = check_tensor("order", order, (num_nodes,), (torch.int64,)).cpu()
        if not torch.equal(order.sort().values, torch.arange(num_nodes)):
            raise ValueError(
                f"order: expected each node from 0 to {num_nodes - 1} once, got others"
            )
        nodes = places_in(order)[nodes]
    own = torch.arange(rows).expand(2, -1)
    blocks = torch.cat([nodes.flip(0) // block_size, own], 1)  # query block, key block
    edges = torch.ones(blocks.shape[1])
    edges[nodes.shape[1] :] = 0.0
    pattern = BlockSparsePattern.from_edges(blocks.T, (rows, rows), block_size, weights=edges)
    most = rows * rows
    if density is not None:
        check_density(density)
        most = math.floor(density * rows * rows + 1e-6)
        if most < rows:
            raise ValueError(
                f"density: expected at least {1 / max(rows, 1):.4g}, a block for each row, "
                f"got {density}"
            )
    places, counts = pattern.places()[1:], pattern.mass_of_entries()
    rank = counts.masked_fill(places[0] == places[1], float("inf"))
    kept = rank.argsort(descending=True, stable=True)[:most]
    return BlockSparsePattern.from_edges(
        places[:, kept].T, (rows, rows), block_size, weights=counts[kept]
    )

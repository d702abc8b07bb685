"""Nearest neighbours: by features, or by steps along a graph."""

from __future__ import annotations

import torch

from sparsek_backend.patterns.graphs.edges import adjacency
from sparsek_kernels.checks import check_int, check_tensor

_MOST_DISTANCES = 1 << 24
"""Distances held at a time: of a few sources to all nodes."""


def knn_edges(features: torch.Tensor, k: int) -> torch.Tensor:
    """``edge_index [2, N k]``: to every node from its ``k`` nearest others, by their features.

    Exact, with a k-d tree.

    Args:
        features: ``[N, F]``, any floating dtype.
        k: neighbours of each node, fewer than N.
    """
    from scipy.spatial import cKDTree

    check_tensor("features", features, ("N", "F"))
    _check_k(k, features.shape[0])
    points = features.detach().cpu().double().numpy()
    found = torch.as_tensor(cKDTree(points).query(points, k + 1)[1], dtype=torch.int64)
    node = torch.arange(points.shape[0])[:, None]
    # Nodes in one place may find each other before themselves.
    itself = found == node
    itself[:, -1] |= ~itself.any(1)
    return torch.stack([found[~itself], node.expand(-1, k).flatten()])


def graph_knn_edges(edge_index: torch.Tensor, num_nodes: int, k: int, *, hops: int) -> torch.Tensor:
    """``edge_index``: to every node from the ``k`` nearest others along a graph.

    Near is few steps against the edges; of equally near nodes the lower numbers come first.

    Args:
        edge_index: ``[2, E]`` int64, from source to target.
        num_nodes: N.
        k: most neighbours of each node, fewer than N.
        hops: most steps to a neighbour.
    """
    from scipy.sparse import csgraph

    _check_k(k, num_nodes)
    check_int("hops", hops, 1)
    graph = adjacency(edge_index.flip(0), num_nodes)  # paths start at targets
    step = max(_MOST_DISTANCES // num_nodes, 1)
    edges = []
    for first in range(0, num_nodes, step):
        nodes = torch.arange(first, min(first + step, num_nodes))
        steps = csgraph.dijkstra(graph, indices=nodes.numpy(), unweighted=True, limit=hops)
        distance = torch.as_tensor(steps).clone()
        distance[torch.arange(len(nodes)), nodes] = float("inf")
        nearest = distance.argsort(dim=1, stable=True)[:, :k]
        reached = distance.gather(1, nearest).isfinite()
        edges.append(torch.stack([nearest[reached], nodes[:, None].expand(-1, k)[reached]]))
    return torch.cat(edges, 1)


def _check_k(k: int, num_nodes: int) -> None:
    check_int("k", k, 1)
    if k >= num_nodes:
        raise ValueError(f"k: expected fewer than the {num_nodes} nodes, got {k}")

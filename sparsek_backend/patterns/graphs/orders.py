"""Orders of nodes that put neighbours side by side, so that edges fill few blocks."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_backend.patterns.graphs.communities import condensed_graph
from sparsek_backend.patterns.graphs.edges import adjacency, places_in


def cuthill_mckee_order(edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """``[N]`` int64: nodes in reverse Cuthill-McKee order, by which edges lie near the diagonal.

    Args:
        edge_index: ``[2, E]`` int64; the direction of edges does not matter.
        num_nodes: N.
    """
    return _narrow(adjacency(edge_index, num_nodes))


def community_order(edge_index: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``[N]`` int64: nodes by community, near communities and near nodes side by side.

    Communities are in the reverse Cuthill-McKee order of the graph between them, the nodes of one
    in that of the whole graph.

    Args:
        edge_index: ``[2, E]`` int64.
        labels: ``[N]`` int64, the community of each node.
    """
    inner = cuthill_mckee_order(edge_index, labels.shape[0])
    outer = places_in(_narrow(condensed_graph(edge_index, labels)))
    return inner[outer[labels.cpu()[inner]].argsort(stable=True)]


def _narrow(graph: Any) -> torch.Tensor:
    from scipy.sparse import csgraph

    both = (graph + graph.T).tocsr()
    order = csgraph.reverse_cuthill_mckee(both, symmetric_mode=True)
    return torch.as_tensor(order.copy(), dtype=torch.int64)

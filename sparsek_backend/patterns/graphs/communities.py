"""Communities of a graph, and the graph between them."""

from __future__ import annotations

from typing import Any, Literal

import torch

from sparsek_backend.patterns.graphs.edges import adjacency
from sparsek_kernels.checks import check_tensor

Method = Literal["louvain", "label_propagation"]


def find_communities(
    edge_index: torch.Tensor, num_nodes: int, *, method: Method = "louvain", seed: int = 0
) -> torch.Tensor:
    """``[N]`` int64: the community of each node; the largest is 0.

    Args:
        edge_index: ``[2, E]`` int64; the direction of edges does not matter.
        num_nodes: N.
        method: ``louvain`` (Blondel et al., arXiv 0803.0476) or ``label_propagation`` (Raghavan
            et al., arXiv 0709.2938), both from networkx.
        seed: the same seed gives the same communities.
    """
    import networkx

    edges = adjacency(edge_index, num_nodes)
    graph = networkx.from_scipy_sparse_array(edges.maximum(edges.T))  # an edge joins both its ends
    if method == "louvain":
        found = networkx.community.louvain_communities(graph, seed=seed)
    elif method == "label_propagation":
        found = networkx.community.asyn_lpa_communities(graph, seed=seed)
    else:
        raise ValueError(f"method: expected 'louvain' or 'label_propagation', got {method!r}")
    labels = torch.empty(num_nodes, dtype=torch.int64)
    for label, members in enumerate(sorted(found, key=lambda x: (-len(x), min(x)))):
        labels[list(members)] = label
    return labels


def condensed_graph(edge_index: torch.Tensor, labels: torch.Tensor) -> Any:
    """The graph of communities: a scipy CSR array ``[communities, communities]`` of edge counts.

    Args:
        edge_index: ``[2, E]`` int64.
        labels: ``[N]`` int64, the community of each node.
    """
    check_tensor("labels", labels, ("N",), (torch.int64,))
    adjacency(edge_index, labels.shape[0])  # checks the nodes
    communities = int(labels.max()) + 1 if labels.numel() else 0
    return adjacency(labels.cpu()[edge_index.cpu()], communities)


def community_edges(
    edge_index: torch.Tensor, labels: torch.Tensor, *, share: float
) -> torch.Tensor:
    """The edges inside communities, and those between the most connected pairs of them.

    Args:
        edge_index: ``[2, E]`` int64.
        labels: ``[N]`` int64, the community of each node.
        share: of the edges between communities that stay, from 0 to 1; whole pairs of
            communities, those with the most edges first.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share: expected a number from 0 to 1, got {share}")
    between = condensed_graph(edge_index, labels).tocoo()
    row, col = (torch.as_tensor(x, dtype=torch.int64) for x in (between.row, between.col))
    counts = torch.as_tensor(between.data).masked_fill(row == col, 0.0)
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    listed = order[before < share * counts.sum()]
    source, target = labels.cpu()[edge_index.cpu()]
    pairs = row[listed] * between.shape[0] + col[listed]
    kept = (source == target) | torch.isin(source * between.shape[0] + target, pairs)
    return edge_index[:, kept.to(edge_index.device)]

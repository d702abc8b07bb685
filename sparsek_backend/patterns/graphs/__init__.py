"""Patterns from graphs: edges, neighbours, communities, orders; and attention over graphs."""

from sparsek_backend.patterns.entries import edge_index_of
from sparsek_backend.patterns.graphs.attention import GraphAttention
from sparsek_backend.patterns.graphs.communities import (
    community_edges,
    condensed_graph,
    find_communities,
)
from sparsek_backend.patterns.graphs.edges import edge_pattern
from sparsek_backend.patterns.graphs.hnsw import hnsw_edges
from sparsek_backend.patterns.graphs.layout import GraphLayout, graph_layout
from sparsek_backend.patterns.graphs.neighbours import graph_knn_edges, knn_edges
from sparsek_backend.patterns.graphs.orders import community_order, cuthill_mckee_order

__all__ = [
    "GraphAttention",
    "GraphLayout",
    "community_edges",
    "community_order",
    "condensed_graph",
    "cuthill_mckee_order",
    "edge_index_of",
    "edge_pattern",
    "find_communities",
    "graph_knn_edges",
    "graph_layout",
    "hnsw_edges",
    "knn_edges",
]

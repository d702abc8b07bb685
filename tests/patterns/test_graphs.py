"""Patterns from graphs, on graphs whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("networkx", reason="networkx is not installed (the patterns extra)")
pytest.importorskip("scipy", reason="scipy is not installed (the patterns extra)")

import networkx

from sparsek_backend.patterns.graphs import (
    community_edges,
    community_order,
    condensed_graph,
    cuthill_mckee_order,
    edge_index_of,
    edge_pattern,
    find_communities,
    graph_knn_edges,
    hnsw_edges,
    knn_edges,
)


def planted(size: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four communities under random numbers: edges both ways, and each node's community."""
    sizes, inside, across = [size // 4] * 4, 0.7, 0.01
    chance = [[inside if a == b else across for b in range(4)] for a in range(4)]
    edges, _ = edge_index_of(networkx.stochastic_block_model(sizes, chance, seed=seed))
    numbers = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    truth = torch.empty(size, dtype=torch.int64)
    truth[numbers] = torch.arange(4).repeat_interleave(size // 4)
    return numbers[edges], truth


def test_edges_of_graphs_and_matrices() -> None:
    arrows = networkx.DiGraph([(0, 2), (1, 0)])
    edges, nodes = edge_index_of(arrows)
    assert nodes == 3
    assert sorted(edges.T.tolist()) == [[0, 2], [1, 0]]
    again, _ = edge_index_of(networkx.to_scipy_sparse_array(arrows, nodelist=range(3)))
    assert torch.equal(again, edges)
    assert edge_index_of(networkx.path_graph(3))[0].shape == (2, 4)


def test_blocks_count_the_edges_of_targets_and_sources() -> None:
    edges = torch.tensor([[40, 41, 0, 5], [1, 2, 17, 6]])
    pattern = edge_pattern(edges, 50, 16)
    assert pattern.shape == (4, 4)
    assert pattern.mass()[0].tolist() == [
        [1.0, 0.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4,
    ]  # fmt: skip
    assert pattern.mask()[0].diagonal().all()
    assert pattern.num_blocks == 6
    heavy = edge_pattern(edges, 50, 16, density=5 / 16)
    assert heavy.mask()[0].nonzero().tolist() == [[0, 0], [0, 2], [1, 1], [2, 2], [3, 3]]
    turned = edge_pattern(edges, 50, 16, order=torch.arange(49, -1, -1))
    assert turned.mass()[0].sum() == 4


def test_a_large_graph_needs_no_grid() -> None:
    """The grid of 62,500 x 62,500 blocks would take 3.6 GiB."""
    edges = torch.randint(0, 1_000_000, (2, 20_000), generator=torch.Generator().manual_seed(0))
    pattern = edge_pattern(edges, 1_000_000, 16)
    assert pattern.mass_of_entries().sum() == 20_000
    assert pattern.num_blocks <= 62_500 + 20_000


def test_nearest_by_features() -> None:
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    points[7] = points[3]  # two nodes in one place
    distance = torch.cdist(points, points).fill_diagonal_(float("inf"))
    edges = knn_edges(points, 5)
    for target in range(40):
        found = edges[0][edges[1] == target]
        assert len(set(found.tolist())) == 5
        nearest = distance[target].topk(5, largest=False).values
        torch.testing.assert_close(distance[target][found].sort().values, nearest)


def test_nearest_along_a_graph() -> None:
    path = torch.stack([torch.arange(9), torch.arange(1, 10)])  # 0 -> 1 -> ... -> 9
    edges = graph_knn_edges(path, 10, 2, hops=3)
    assert edges[0][edges[1] == 5].tolist() == [4, 3]
    assert edges[0][edges[1] == 1].tolist() == [0]
    assert not (edges[1] == 0).any()
    assert graph_knn_edges(path, 10, 5, hops=3).shape[1] == 3 * 7 + 2 + 1


@pytest.mark.parametrize("method", ["louvain", "label_propagation"])
def test_communities_are_found(method: Any) -> None:
    edges, truth = planted()
    labels = find_communities(edges, 64, method=method)
    same = labels[:, None] == labels
    assert torch.equal(same, truth[:, None] == truth)
    assert torch.equal(find_communities(edges, 64, method=method), labels)


def test_the_direction_of_edges_does_not_matter() -> None:
    edges = torch.randint(8, (2, 30), generator=torch.Generator().manual_seed(0))
    assert torch.equal(find_communities(edges, 8), find_communities(edges.flip(0), 8))


def test_the_graph_between_communities() -> None:
    edges, truth = planted()
    between = torch.as_tensor(condensed_graph(edges, truth).toarray())
    assert between.sum() == edges.shape[1]
    source, target = truth[edges]
    assert between[1, 2] == ((source == 1) & (target == 2)).sum()
    inside = community_edges(edges, truth, share=0.0)
    assert inside.shape[1] == (source == target).sum()
    assert torch.equal(community_edges(edges, truth, share=1.0), edges)
    some = community_edges(edges, truth, share=0.5)
    assert inside.shape[1] < some.shape[1] < edges.shape[1]


def test_orders_make_blocks_dense() -> None:
    edges, truth = planted(128)
    orders = {"communities": community_order(edges, truth)}
    ring = torch.stack([torch.arange(128), (torch.arange(128) + 1) % 128])
    numbers = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    orders["ring"] = cuthill_mckee_order(numbers[ring], 128)
    for name, graph in (("communities", edges), ("ring", numbers[ring])):
        order = orders[name]
        assert torch.equal(order.sort().values, torch.arange(128))
        budget = 0.3
        held = edge_pattern(graph, 128, 16, density=budget, order=order).mass_of_entries().sum()
        as_numbered = edge_pattern(graph, 128, 16, density=budget).mass_of_entries().sum()
        assert held > 0.9 * graph.shape[1]
        assert as_numbered < 0.6 * graph.shape[1]
    assert (truth[orders["communities"]].diff() != 0).sum() == 3


def test_layers_of_a_navigable_graph() -> None:
    pytest.importorskip("hnswlib")
    points = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    layers = hnsw_edges(points, links=4)
    assert len(layers) > 2
    lowest = set(map(tuple, layers[0].T.tolist()))
    near = set(map(tuple, knn_edges(points, 3).T.tolist()))
    assert len(lowest & near) > 0.6 * len(near)
    nodes = [len(layer.unique()) for layer in layers]
    assert nodes[0] == 300
    assert nodes == sorted(nodes, reverse=True)
    assert not any((layer[0] == layer[1]).any() for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(layers, hnsw_edges(points, links=4), strict=True))


EDGES, SAME = torch.tensor([[0, 1], [1, 2]]), torch.zeros(3, dtype=torch.int64)
PAIR = networkx.Graph([(1, 2)])
REFUSED: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "graph: expected a networkx graph or a scipy", lambda: edge_index_of([[0, 1]])),
    (ValueError, "graph: expected the nodes 0 to 1", lambda: edge_index_of(PAIR)),
    (ValueError, "edge_index: expected nodes from 0 to 1", lambda: edge_pattern(EDGES, 2, 16)),
    (ValueError, r"edge_index: expected shape \[2, E\]", lambda: edge_pattern(EDGES[0], 3, 16)),
    (TypeError, "edge_index: expected dtype", lambda: edge_pattern(EDGES.int(), 3, 16)),
    (ValueError, "density: expected at least", lambda: edge_pattern(EDGES, 64, 16, density=0.1)),
    (ValueError, "order: expected shape", lambda: edge_pattern(EDGES, 3, 16, order=SAME[:2])),
    (ValueError, "order: expected each node", lambda: edge_pattern(EDGES, 3, 16, order=SAME)),
    (ValueError, "k: expected fewer than the 3", lambda: knn_edges(torch.randn(3, 2), 3)),
    (ValueError, "hops: expected an integer >= 1", lambda: graph_knn_edges(EDGES, 3, 1, hops=0)),
    (ValueError, "method: expected 'louv", lambda: find_communities(EDGES, 3, method="x")),  # type: ignore[arg-type]
    (ValueError, "share: expected a number", lambda: community_edges(EDGES, SAME, share=2)),
]


@pytest.mark.parametrize(("error", "message", "action"), REFUSED, ids=[r[1] for r in REFUSED])
def test_refuses(error: type[Exception], message: str, action: Any) -> None:
    with pytest.raises(error, match=message):
        action()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "hnswlib", None)
    with pytest.raises(ImportError, match=r"pip install 'sparsek-backend\[graphs\]'"):
        hnsw_edges(torch.randn(3, 2))

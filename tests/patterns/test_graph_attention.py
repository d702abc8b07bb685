"""Attention over graphs: against a dense mask, on batches, and on a task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("networkx", reason="networkx is not installed (the patterns extra)")
pytest.importorskip("scipy", reason="scipy is not installed (the patterns extra)")

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.graphs import GraphAttention, GraphLayout, graph_layout
from tests.patterns.test_graphs import planted


def dense(layer: GraphAttention, x: torch.Tensor, layout: GraphLayout) -> torch.Tensor:
    """The layer's output by a dense mask over the nodes."""
    block = layout.slots // layout.pattern.block_size
    seen = layout.pattern.mask()[0][block[:, None], block]
    q, k, v = (
        project(x).unflatten(1, (layer.heads, -1)).transpose(0, 1)
        for project in (layer.lin_query, layer.lin_key, layer.lin_value)
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    out = out.transpose(0, 1)
    out = out.flatten(1) if layer.concat else out.mean(1)
    return out if layer.lin_skip is None else out + layer.lin_skip(x)


@pytest.mark.parametrize("order", ["communities", "cuthill_mckee", "given"])
@pytest.mark.parametrize("concat", [True, False])
def test_nodes_attend_the_blocks_of_their_edges(order: Any, concat: bool) -> None:
    torch.manual_seed(0)
    edges, _ = planted(64)
    edges = edges[:, (edges < 60).all(0)]
    layer = GraphAttention(
        6, 8, heads=2, concat=concat, block_size=16, density=0.5, order=order, root_weight=concat
    )
    x = torch.randn(60, 6, requires_grad=True)
    layout = graph_layout(edges, 60, 16, density=0.5, order=order)
    assert layout.real is None
    assert layout.pattern.num_blocks <= 8
    out, wanted = layer(x, edges), dense(layer, x, layout)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(layer(x, layout), wanted)
    grads = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (out, wanted)]
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("concat", [True, False])
def test_gradcheck(concat: bool) -> None:
    torch.manual_seed(0)
    edges = torch.randint(40, (2, 120))
    layer = GraphAttention(3, 4, heads=2, concat=concat, block_size=16, density=0.5).double()
    leaves = [torch.randn(40, 3, dtype=torch.float64, requires_grad=True), *layer.parameters()]
    layout = graph_layout(edges, 40, 16, density=0.5)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, layout), leaves, fast_mode=True)


def test_graphs_of_a_batch_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    layer = GraphAttention(6, 8, heads=2, block_size=16)
    graphs = [planted(size, seed=size)[0] for size in (20, 48, 8)]
    xs = [torch.randn(size, 6) for size in (20, 48, 8)]
    first = torch.tensor([0, 20, 68])
    edges = torch.cat([g + f for g, f in zip(graphs, first, strict=True)], 1)
    batch = torch.arange(3).repeat_interleave(torch.tensor([20, 48, 8]))
    together = layer(torch.cat(xs), edges, batch)
    alone = torch.cat([layer(x, g) for x, g in zip(xs, graphs, strict=True)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    mixed = torch.randperm(76, generator=torch.Generator().manual_seed(1))
    renumbered = torch.empty_like(mixed)
    renumbered[mixed] = torch.arange(76)
    again = layer(torch.cat(xs)[mixed], renumbered[edges], batch[mixed])
    torch.testing.assert_close(again, together[mixed], atol=1e-5, rtol=1e-5)


def test_a_layout_is_made_once_for_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek_backend.patterns.graphs import layout

    made: list[int] = []
    real = layout.graph_layout
    monkeypatch.setattr(layout, "graph_layout", lambda *a, **k: made.append(1) or real(*a, **k))
    edges, _ = planted(32)
    first, second = GraphAttention(4, 8, block_size=16), GraphAttention(8, 8, block_size=16)
    for _ in range(2):
        second(first(torch.randn(32, 4), edges), edges)
    assert len(made) == 1
    edges.copy_(edges.flip(0))
    first(torch.randn(32, 4), edges)
    assert len(made) == 2
    for _ in range(3):  # a buffer for the edges of every step
        edges.copy_(edges.flip(0))
        first(torch.randn(32, 4), edges)
    assert len(layout._layouts[edges]) == 1, "layouts of what it held before are gone"


def test_a_compiled_layer_lays_graphs_out_on_the_host() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    layer, x = GraphAttention(3, 4, block_size=16), torch.randn(40, 3)
    compiled = torch.compile(layer, backend=counter)
    for _ in range(2):
        edges = torch.randint(40, (2, 120))
        torch.testing.assert_close(compiled(x, edges), layer(x, edges))
    assert counter.frame_count <= 4


def test_graphs_of_inference_mode() -> None:
    layer = GraphAttention(4, 8, heads=2, block_size=16)
    x, edges = torch.randn(40, 4), torch.randint(40, (2, 90))
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, edges.clone()), layer(x, edges))
    layer(x, edges).sum().backward()  # its layout was made in inference mode
    assert layer.lin_query.weight.grad is not None


def test_nodes_are_classified_as_well_as_by_dense_attention() -> None:
    """Features say little, neighbourhoods tell; 90 % of the blocks are left out."""
    edges, truth = planted(320, seed=3)
    torch.manual_seed(0)
    x = torch.nn.functional.one_hot(truth, 4) + 1.5 * torch.randn(320, 4)
    train = torch.rand(320) < 0.3
    sparse = graph_layout(edges, 320, 16, density=0.1)
    everything = BlockSparsePattern.from_mask(torch.ones(20, 20).bool(), 16)
    assert sparse.pattern.density <= 0.1
    found = []
    for layout in (sparse, GraphLayout(sparse.slots, None, everything)):
        layer = GraphAttention(4, 16, heads=2, block_size=16)
        model = torch.nn.ModuleList([layer, torch.nn.Linear(32, 4)])
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(40):
            logits = model[1](layer(x, layout).relu())
            loss = torch.nn.functional.cross_entropy(logits[train], truth[train])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        found.append(float((logits.argmax(1) == truth)[~train].float().mean()))
    by_features = float((x.argmax(1) == truth)[~train].float().mean())
    assert found[0] > found[1] - 0.01
    assert found[0] > by_features + 0.2


def test_as_pytorch_geometric_calls_it() -> None:
    pytest.importorskip("torch_geometric", reason="the graphs extra is not installed")
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import Sequential, TransformerConv
    from torch_geometric.utils import k_hop_subgraph

    torch.manual_seed(0)
    graphs = [Data(torch.randn(n, 6), planted(n)[0]) for n in (24, 40)]
    whole = Batch.from_data_list(graphs)
    ours = GraphAttention(6, 4, heads=2, block_size=16)
    theirs = TransformerConv(6, 4, heads=2)
    assert set(dict(ours.named_parameters())) == set(dict(theirs.named_parameters()))
    ours.load_state_dict(theirs.state_dict())
    out = ours(whole.x, whole.edge_index, whole.batch)
    assert out.shape == theirs(whole.x, whole.edge_index).shape
    model = Sequential(
        "x, edge_index, batch",
        [
            (ours, "x, edge_index, batch -> x"),
            torch.nn.ReLU(),
            (
                GraphAttention(8, 3, heads=2, concat=False, block_size=16),
                "x, edge_index, batch -> x",
            ),
        ],
    )
    assert model(whole.x, whole.edge_index, whole.batch).shape == (64, 3)
    assert repr(ours) == repr(theirs).replace("TransformerConv", "GraphAttention")
    # A mini-batch of a large graph is the subgraph around a few nodes.
    nodes, edges, places, _ = k_hop_subgraph([3, 9], 1, graphs[1].edge_index, relabel_nodes=True)
    assert ours(graphs[1].x[nodes], edges)[places].shape == (2, 8)


def test_complete_graphs_agree_with_pytorch_geometric() -> None:
    """Where every node has an edge from every node, blocks and edges are the same."""
    pytest.importorskip("torch_geometric", reason="the graphs extra is not installed")
    from torch_geometric.nn import TransformerConv

    torch.manual_seed(0)
    edges = torch.cartesian_prod(torch.arange(40), torch.arange(40)).T.contiguous()
    theirs = TransformerConv(6, 4, heads=2)
    ours = GraphAttention(6, 4, heads=2, block_size=16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, 6)
    torch.testing.assert_close(ours(x, edges), theirs(x, edges), atol=1e-5, rtol=1e-5)


EDGES = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("order: expected one of communities", {"order": "sorted"}),
        ("batch: expected edges inside graphs", {"batch": torch.tensor([0, 0, 1])}),
        ("batch: expected graphs from 0 on, got -1", {"batch": torch.tensor([0, 0, -1])}),
        (r"batch: expected shape \[3\]", {"batch": torch.tensor([0, 0])}),
    ],
)
def test_refuses(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        graph_layout(EDGES, 3, 16, **arguments)
    with pytest.raises(ValueError, match=r"x: expected shape \[N, 4\]"):
        GraphAttention(4, 8)(torch.randn(3, 5), EDGES)
    layout, batch = graph_layout(EDGES, 3, 16), torch.tensor([0, 0, 0])
    with pytest.raises(ValueError, match="batch: expected None with a layout"):
        GraphAttention(4, 8)(torch.randn(3, 4), layout, batch)

"""Nodes laid out as a sequence of blocks, with the pattern of their edges."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek_backend.patterns.graphs.communities import find_communities
from sparsek_backend.patterns.graphs.edges import check_edges, edge_pattern, places_in
from sparsek_backend.patterns.graphs.orders import community_order, cuthill_mckee_order
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_kernels.checks import check_int, check_tensor

Order = Literal["communities", "cuthill_mckee", "given"]


@dataclass(frozen=True, eq=False)
class GraphLayout:
    """Where each node sits in the sequence that attention runs over.

    Args:
        slots: ``[N]`` int64, the place of each node.
        real: ``[L]`` bool, the places that hold a node; ``None`` where all do.
        pattern: over the L places.
    """

    slots: torch.Tensor
    real: torch.Tensor | None
    pattern: BlockSparsePattern

    @property
    def length(self) -> int:
        """L, places of the sequence."""
        return self.slots.shape[0] if self.real is None else self.real.shape[0]


def graph_layout(
    edge_index: torch.Tensor,
    num_nodes: int,
    block_size: int,
    *,
    density: float | None = None,
    order: Order = "communities",
    batch: torch.Tensor | None = None,
) -> GraphLayout:
    """Lay out a graph, or a batch of graphs none of which sees another.

    Args:
        edge_index: ``[2, E]`` int64, from source to target; targets attend their sources.
        num_nodes: N.
        block_size: nodes along a side of a block.
        density: most blocks, as a share of the grid; all blocks with an edge when ``None``.
        order: puts neighbours side by side: by ``communities`` (Louvain), in reverse
            ``cuthill_mckee`` order (fast, for large graphs), or as ``given``.
        batch: ``[N]`` int64, the graph of each node, as PyTorch Geometric's loaders give it; each
            graph begins a block of its own.

    Raises:
        ValueError: an argument out of range, or an edge between two graphs.
    """
    check_edges(edge_index, num_nodes)
    check_int("num_nodes", num_nodes, 1)
    if order not in get_args(Order):
        raise ValueError(f"order: expected one of {', '.join(get_args(Order))}, got {order!r}")
    device, edges = edge_index.device, edge_index.cpu()
    if order == "communities":
        nodes = community_order(edges, find_communities(edges, num_nodes))
    elif order == "cuthill_mckee":
        nodes = cuthill_mckee_order(edges, num_nodes)
    else:
        nodes = torch.arange(num_nodes)
    slots, real = places_in(nodes), None
    if batch is not None:
        slots, real = _apart(nodes, batch, edges, block_size)
    length = num_nodes if real is None else real.shape[0]
    pattern = edge_pattern(slots[edges], length, block_size, density=density)
    real = None if real is None or bool(real.all()) else real.to(device)
    return GraphLayout(slots.to(device), real, pattern.to(device))


def _apart(
    nodes: torch.Tensor, batch: torch.Tensor, edges: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the nodes, each graph from the start of a block, and which places are used."""
    graphs = check_tensor("batch", batch, (len(nodes),), (torch.int64,)).cpu()
    if bool((graphs < 0).any()):
        raise ValueError(f"batch: expected graphs from 0 on, got {int(graphs.min())}")
    if bool((graphs[edges[0]] != graphs[edges[1]]).any()):
        raise ValueError("batch: expected edges inside graphs, got one between two")
    nodes = nodes[graphs[nodes].argsort(stable=True)]
    sizes = torch.bincount(graphs)
    room = (sizes + block_size - 1) // block_size * block_size
    gap = (room.cumsum(0) - room) - (sizes.cumsum(0) - sizes)
    slots = places_in(nodes) + gap[graphs]
    real = torch.zeros(int(room.sum()), dtype=torch.bool)
    real[slots] = True
    return slots, real


_Key = tuple[object, ...]
_Known = tuple[object, torch.Tensor | None, GraphLayout]
_layouts: MutableMapping[torch.Tensor, dict[_Key, _Known]] = WeakTensorKeyDictionary()


# A layout is made on the host, between compiled graphs.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def known_layout(
    edge_index: torch.Tensor,
    num_nodes: int,
    block_size: int,
    *,
    density: float | None,
    order: Order,
    batch: torch.Tensor | None,
) -> GraphLayout:
    """:func:`graph_layout`, made once for each tensor, so that layers and epochs share it.

    Made anew for tensors of inference mode, which do not count their changes.
    """
    make = partial(graph_layout, edge_index, num_nodes, block_size, density=density, order=order)
    if edge_index.is_inference() or (batch is not None and batch.is_inference()):
        return make(batch=batch)
    versions = (edge_index._version, None if batch is None else batch._version)
    key: _Key = (num_nodes, block_size, density, order)
    known = _layouts.setdefault(edge_index, {})
    found = known.get(key)
    if found is None or found[0] != versions or found[1] is not batch:
        with torch.inference_mode(False):  # what is kept serves training too
            found = known[key] = (versions, batch, make(batch=batch))
    return found[2]

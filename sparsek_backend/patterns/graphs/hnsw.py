"""The layers of a hierarchical navigable small world graph over node features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparsek_backend.extras import needing
from sparsek_kernels.checks import check_int, check_tensor

_STATE_VERSION = 1


def hnsw_edges(
    features: torch.Tensor, *, links: int = 16, ef_construction: int = 200, seed: int = 0
) -> list[torch.Tensor]:
    """``edge_index`` of every layer, the lowest first (Malkov and Yashunin, arXiv 1603.09320).

    The lowest layer links near nodes, the higher ones link fewer nodes further apart.

    Args:
        features: ``[N, F]``, any floating dtype; near is a small Euclidean distance.
        links: most links of a node in a layer; twice as many in the lowest.
        ef_construction: candidates looked at for each node: more are slower and better.
        seed: the same seed gives the same layers.

    Raises:
        ImportError: hnswlib is missing; the message has the install command.
    """
    with needing("HNSW layers need hnswlib", extra="graphs"):
        import hnswlib
    check_tensor("features", features, ("N", "F"))
    check_int("links", links, 2)
    check_int("ef_construction", ef_construction, 1)
    nodes = features.shape[0]
    index = hnswlib.Index("l2", features.shape[1])
    index.init_index(nodes, M=links, ef_construction=ef_construction, random_seed=seed)
    index.add_items(features.detach().cpu().float().numpy(), num_threads=1)
    state = index.__getstate__()[0]
    if state["ser_version"] != _STATE_VERSION:
        raise NotImplementedError(
            f"hnswlib: expected a state of version {_STATE_VERSION}, got {state['ser_version']}; "
            "use knn_edges"
        )
    return [_edges(layer, state) for layer in _layers(state, nodes)]


def _layers(state: dict[str, Any], nodes: int) -> list[dict[int, np.ndarray[Any, Any]]]:
    """For each layer, the links of each node as hnswlib stores them: a count, then the nodes."""
    lowest = state["data_level0"].view(np.uint8).reshape(nodes, -1)
    begin = state["offset_level0"]
    lowest = lowest[:, begin : begin + 4 * (state["max_M0"] + 1)]
    layers = [{node: lowest[node].copy().view(np.uint32) for node in range(nodes)}]
    layers += [{} for _ in range(state["max_level"])]
    higher = state["link_lists"].view(np.uint8)
    size, begin = state["size_links_per_element"], 0
    for node, level in enumerate(state["element_levels"].tolist()):
        for layer in range(1, level + 1):
            layers[layer][node] = higher[begin : begin + size].copy().view(np.uint32)
            begin += size
    return layers


def _edges(layer: dict[int, np.ndarray[Any, Any]], state: dict[str, Any]) -> torch.Tensor:
    """``[2, E]``: to each node from those that it links, by the numbers they were added under."""
    inner = dict(zip(state["label_lookup_internal"], state["label_lookup_external"], strict=True))
    pairs = [
        (int(inner[linked]), int(inner[node]))
        for node, links in layer.items()
        for linked in links[1 : 1 + (int(links[0]) & 0xFFFF)]
    ]
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()

"""GraphAttention: accuracy against dense attention on a citation graph, and a graph of a million.

    python benchmarks/graph_attention.py --json graph_attention.json        # a GPU
    python benchmarks/graph_attention.py --toy --json /tmp/toy.json         # a CPU, a minute

The citation graph is generated: a stochastic block model of networkx with the nodes, classes and
mean degree of Cora, and word vectors of Cora's size whose words depend on the class.  The large
graph is a ring of communities, with nine of ten edges inside them and the others to a neighbouring
one, under random numbers.  Times are of one layer, forward and backward, beside edge-by-edge
attention (PyTorch Geometric's TransformerConv) where that is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import networkx
import torch
import torch.nn.functional as F

from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.graphs import (
    GraphAttention,
    GraphLayout,
    edge_index_of,
    graph_layout,
)

CLASSES, WORDS, DEGREE, HOMOPHILY = 7, 1433, 3.9, 0.81
"""Of Cora: classes, words, mean degree, and the share of edges inside a class."""


def citations(nodes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features ``[N, WORDS]``, edges ``[2, E]`` both ways, and classes ``[N]``."""
    sizes = [nodes // CLASSES + (c < nodes % CLASSES) for c in range(CLASSES)]
    inside = DEGREE * HOMOPHILY * CLASSES / nodes
    across = DEGREE * (1 - HOMOPHILY) * CLASSES / (CLASSES - 1) / nodes
    chance = [[inside if a == b else across for b in range(CLASSES)] for a in range(CLASSES)]
    graph = networkx.stochastic_block_model(sizes, chance, seed=seed)
    edges, _ = edge_index_of(graph)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(nodes, generator=generator)
    classes = torch.empty(nodes, dtype=torch.int64)
    classes[numbers] = torch.arange(CLASSES).repeat_interleave(torch.tensor(sizes))
    # About 18 words each, a quarter of them from the words of the class.
    topic = torch.randint(CLASSES, (WORDS,), generator=generator)
    rate = 18 / WORDS * (0.75 + 0.25 * CLASSES * (topic == classes[:, None]))
    return (torch.rand(nodes, WORDS, generator=generator) < rate).float(), numbers[edges], classes


def accuracy(
    x: torch.Tensor, classes: torch.Tensor, layout: GraphLayout, seed: int, steps: int
) -> float:
    """Of a model of two layers on the nodes that it was not trained on; 20 a class train it."""
    torch.manual_seed(seed)
    order = torch.randperm(len(classes))
    ranked = F.one_hot(classes[order], CLASSES).cumsum(0).gather(1, classes[order][:, None])[:, 0]
    train = torch.zeros(len(classes), dtype=torch.bool)
    train[order[ranked <= 20]] = True
    size = layout.pattern.block_size
    first = GraphAttention(WORDS, 8, heads=8, block_size=size).to(x.device)
    second = GraphAttention(64, CLASSES, heads=1, block_size=size).to(x.device)
    parameters = [*first.parameters(), *second.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=0.005, weight_decay=5e-4)
    target = classes.to(x.device)
    for _ in range(steps):
        hidden = F.dropout(F.elu(first(F.dropout(x, 0.6), layout)), 0.6)
        loss = F.cross_entropy(second(hidden, layout)[train], target[train])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        found = second(F.elu(first(x, layout)), layout).argmax(1)
    return float((found == target)[~train].float().mean())


def citation_accuracy(options: argparse.Namespace) -> dict[str, Any]:
    """Mean accuracy with the sparse layout and with dense attention."""
    nodes = 300 if options.toy else 2708
    steps, seeds = (15, 1) if options.toy else (200, 5)
    x, edges, classes = citations(nodes)
    x = x.to(options.device)
    sparse = graph_layout(edges.to(options.device), nodes, 16, density=0.1)
    blocks = -(-nodes // 16)
    whole = BlockSparsePattern.from_mask(torch.ones(blocks, blocks).bool(), 16)
    dense = GraphLayout(sparse.slots, sparse.real, whole.to(options.device))
    found = {
        name: [accuracy(x, classes, layout, seed, steps) for seed in range(seeds)]
        for name, layout in (("sparse", sparse), ("dense", dense))
    }
    means = {f"{name}_accuracy": sum(v) / len(v) for name, v in found.items()}
    return {"nodes": nodes, "sparsity": 1 - sparse.pattern.density, "seeds": seeds, **means}


def communities(nodes: int, degree: int = 10, size: int = 512) -> torch.Tensor:
    """``[2, N degree]`` edges, nine of ten inside a community of ``size`` nodes."""
    generator = torch.Generator().manual_seed(0)
    source = torch.arange(nodes).repeat(degree)
    near = source // size * size + torch.randint(size, source.shape, generator=generator)
    far = (near + size * (2 * torch.randint(2, source.shape, generator=generator) - 1)) % nodes
    inside = torch.rand(source.shape, generator=generator) < 0.9
    target = torch.where(inside, near.clamp(max=nodes - 1), far)
    numbers = torch.randperm(nodes, generator=generator)
    return numbers[torch.stack([source, target])]


def large(options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of one layer over the large graph."""
    nodes = options.nodes or (1024 if options.toy else 1_000_000)
    device, on_gpu = options.device, options.device.type == "cuda"
    edges = communities(nodes)
    blocks = -(-nodes // options.block_size)
    began = time.perf_counter()
    density = min(options.blocks_per_row / blocks, 1.0)
    layout = graph_layout(edges, nodes, options.block_size, density=density, order="cuthill_mckee")
    laid_out = time.perf_counter() - began
    held = layout.pattern.mass_of_entries().sum().item() / edges.shape[1]
    layout = GraphLayout(layout.slots.to(device), None, layout.pattern.to(device))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    layer = GraphAttention(64, 64, heads=8, block_size=options.block_size).to(device, dtype)
    x = torch.randn(nodes, 64, device=device, dtype=dtype, requires_grad=True)
    result: dict[str, Any] = {
        "nodes": nodes, "edges": edges.shape[1], "heads": 8, "head_dim": 64,
        "block_size": options.block_size, "listed_blocks": layout.pattern.num_blocks,
        "edges_in_listed_blocks": held, "layout_seconds": laid_out,
        **measure(lambda: layer(x, layout), on_gpu),
    }  # fmt: skip
    try:
        from torch_geometric.nn import TransformerConv
    except ImportError:
        return result
    peer, on_device = TransformerConv(64, 64, heads=8).to(device, dtype), edges.to(device)
    try:
        found = measure(lambda: peer(x, on_device), on_gpu)
    except torch.cuda.OutOfMemoryError:
        found = {"forward_ms": None, "backward_ms": None, "peak_gib": None}
    return {**result, **{f"transformer_conv_{name}": value for name, value in found.items()}}


def measure(run: Callable[[], torch.Tensor], on_gpu: bool) -> dict[str, float | None]:
    """Medians of five forward and backward passes, and the most memory held."""

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    times: list[tuple[float, float]] = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(6):
        begun = now()
        out = run()
        between = now()
        out.backward(torch.ones_like(out))
        times.append((between - begun, now() - between))
    forward, backward = (sorted(part)[2] * 1e3 for part in zip(*times[1:], strict=True))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {"forward_ms": forward, "backward_ms": backward, "peak_gib": peak}


def main() -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="300 and 1024 nodes")
    parser.add_argument("--nodes", type=int, help="of the large graph")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--blocks-per-row", type=int, default=32, help="on average")
    parser.add_argument("--only", choices=["citations", "large"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.device = choose_device(options.device)
    result: dict[str, Any] = {}
    for name, part in (("citations", citation_accuracy), ("large", large)):
        if options.only in (None, name):
            result[name] = part(options)
            print(name, result[name], flush=True)
    result["machine"] = asdict(describe_machine(options.device, options.commit))
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

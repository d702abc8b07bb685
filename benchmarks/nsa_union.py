"""How many distinct blocks neighbouring tokens select: the union that one program would read.

    python benchmarks/nsa_union.py --model FOLDER --texts A.txt B.txt --json nsa_union.json
    python benchmarks/nsa_union.py --demo FOLDER --json demo.json        # trains the demo's model

A model reads each text densely.  The queries and keys of its layers, rotated, go through
``nsa_compress`` (block means) and ``nsa_select`` with their defaults.  Tokens are taken in groups
of T neighbours, by KV head: ``union`` counts the blocks that any of a group chose, forced ones
included, ``half`` those that half of it chose or more.  A length is the start of the text.  Tokens
are counted from the first that must leave a block out.  Random selections have the same forced
blocks and as many others, drawn evenly from those that causality leaves.

``even`` is the union at which reading K and V once for the group moves as many bytes as parts do
today: each token writes and reads an output of 16 bits for each head and block that is not forced,
and gathers as many rows of q.  ``below`` is the share of groups under it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch

from sparsek_backend.eval.mass import read_layers
from sparsek_backend.machine import describe_machine
from sparsek_backend.train_demo.model import SIZES
from sparsek_backend.train_demo.train import DemoConfig, Trainer
from sparsek_kernels import nsa_compress, nsa_select
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.nsa.torch_path import best_blocks

NEIGHBOURS = (2, 4, 8, 16)
HEADS = 16
"""Query heads of a KV head that ``even`` is worked out for; the measured model may have fewer."""
BINS = 32
BARS = " ▁▂▃▄▅▆▇█"
Chosen: TypeAlias = torch.Tensor
"""``[rows, N, blocks]`` bool: what each token chose, a row per KV head or sequence."""


def chosen_blocks(indices: torch.Tensor, num_blocks: int) -> Chosen:
    """``[..., num_blocks]`` bool of the blocks that ``indices [..., S]`` name; -1 is none."""
    chosen = torch.zeros(*indices.shape[:-1], num_blocks + 1, dtype=torch.bool)
    return chosen.scatter_(-1, indices.long() + 1, True)[..., 1:]  # column 0 takes the -1


def count_blocks(chosen: Chosen, neighbours: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[rows, groups]``: blocks that any of a group of tokens chose, and that half of it did.

    Tokens after the last whole group are left out.
    """
    groups = chosen.shape[1] // neighbours
    whole = chosen[:, : groups * neighbours].unflatten(1, (groups, neighbours))
    votes = whole.sum(2)
    return (votes > 0).sum(-1), (2 * votes >= neighbours).sum(-1)


def random_blocks(rows: int, tokens: int, spec: NSASpec) -> Chosen:
    """Forced blocks, and others drawn evenly from those that a token can see."""
    own = torch.arange(tokens)[:, None] // spec.sel_block_size
    num_blocks = spec.num_selectable(tokens)
    scores = torch.rand(rows, tokens, num_blocks, generator=torch.Generator().manual_seed(0))
    return chosen_blocks(best_blocks(scores, own, spec), num_blocks)


def even_union(neighbours: int, spec: NSASpec) -> float:
    """The union whose K and V are as many bytes as the parts of a group; the head size cancels."""
    parts = 3 * HEADS * (spec.top_n - spec.num_init_blocks - spec.num_local_blocks)
    return neighbours * parts / (2 * spec.sel_block_size)


def summary(union: torch.Tensor, half: torch.Tensor, neighbours: int, top_n: int) -> dict[str, Any]:
    """Of all groups: the union's mean, percentiles and histogram, and the mean of ``half``.

    The histogram's bins cut 0 to ``top_n * neighbours``, which no union exceeds, evenly.
    """
    counts = union.flatten().double()
    tenth, median, ninth = counts.quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
    histogram = torch.histc(counts, BINS, 0, top_n * neighbours)
    return {
        "neighbours": neighbours, "groups": len(counts), "mean": round(float(counts.mean()), 2),
        "p10": tenth, "p50": median, "p90": ninth, "half": round(float(half.double().mean()), 2),
        "histogram": histogram.int().tolist(),
    }  # fmt: skip


class Groups:
    """Counts of one kind of selection, layer by layer, of texts of one length.

    Args:
        kind: what chose.
        spec: block sizes and counts.
        first: tokens are counted from here on; a multiple of all ``NEIGHBOURS``.
    """

    def __init__(self, kind: str, spec: NSASpec, first: int) -> None:
        self.kind, self.spec, self.first = kind, spec, first
        self.found: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, layer: int, chosen: Chosen) -> None:
        """Count what the tokens of a text chose."""
        for size in NEIGHBOURS:
            self.found.setdefault((layer, size), []).append(count_blocks(chosen, size))

    def rows(self, lengths: Sequence[int]) -> list[dict[str, Any]]:
        """A row per length, group size and layer, and one of all layers, named ``all``."""
        layers = sorted({layer for layer, _ in self.found})
        return [
            self._row(name, held, length, size)
            for length in lengths
            for size in NEIGHBOURS
            for name, held in [("all", layers), *((x, [x]) for x in layers)]
        ]

    def _row(self, name: str | int, held: list[int], length: int, size: int) -> dict[str, Any]:
        counted = slice(self.first // size, length // size)
        pairs = [pair for layer in held for pair in self.found[layer, size]]
        union, half = (
            torch.cat([x[:, counted] for x in kind]) for kind in zip(*pairs, strict=True)
        )
        row = {"kind": self.kind, "layer": name, "length": length}
        row |= summary(union, half, size, self.spec.top_n)
        if self.kind != "demo":
            even = even_union(size, self.spec)
            row |= {"even": even, "below": round(float((union < even).double().mean()), 4)}
        return row


def measure_model(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of a model's layers and of random selections, and what was read."""
    from transformers import AutoTokenizer

    spec, tokens = NSASpec(), max(options.lengths)
    first, num_blocks = spec.top_n * spec.sel_block_size, spec.num_selectable(tokens)
    if min(options.lengths) <= first:
        raise ValueError(f"lengths: expected more than {first} tokens, got {min(options.lengths)}")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    groups, heads = Groups("model", spec, first), {}

    def record(layer: int, q: torch.Tensor, k: torch.Tensor, _: torch.Tensor, scale: float) -> None:
        heads.update(num_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3])
        k_cmp, _ = nsa_compress(k, k)
        indices = nsa_select(q, k_cmp, softmax_scale=scale)
        groups.add(layer, chosen_blocks(indices[0].transpose(0, 1).cpu(), num_blocks))

    for path in options.texts:
        ids = tokenizer(path.read_text(encoding="utf-8")).input_ids[:tokens]
        if len(ids) < tokens:
            raise ValueError(f"texts: expected {tokens} tokens, {path} has {len(ids)}")
        read_layers(str(options.model), ids, record)
        print(f"read {path.stem}", flush=True)
    drawn = Groups("random", spec, first)
    drawn.add(0, random_blocks(8, tokens, spec))
    drawn_rows = [x for x in drawn.rows(options.lengths) if x["layer"] == "all"]
    return {
        "model": options.name or options.model.name, **heads, "spec": asdict(spec),
        "texts": [x.stem for x in options.texts], "counted_from": first,
        "rows": groups.rows(options.lengths) + drawn_rows,
    }  # fmt: skip


def measure_demo(folder: Path, config: DemoConfig) -> dict[str, Any]:
    """Rows of the demo's model, and of random ones, over the half of its sequences that asks."""
    trainer = Trainer(config, "nsa", folder, torch.device("cpu"))
    while len(trainer.losses) < config.steps:
        trainer.step()
    nsa, length = SIZES.nsa, config.lengths[-1]
    spec = NSASpec(
        nsa.cmp_block_size, nsa.cmp_stride, nsa.sel_block_size, nsa.top_n, nsa.num_init_blocks,
        nsa.num_local_blocks,
    )  # fmt: skip
    rows = []
    chosen, _ = trainer.selections(length)
    for name, made in (("model", chosen), ("random", random_blocks(len(chosen), length, spec))):
        groups = Groups("demo", spec, length // 2)
        groups.add(0, made)
        rows += [x | {"kind": name} for x in groups.rows([length]) if x["layer"] == "all"]
    return {
        "config": asdict(config), "recall": round(trainer.recall(length), 4),
        "spec": asdict(spec), "counted_from": length // 2, "rows": rows,
    }  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line per row, its histogram as bars."""
    for x in rows:
        most = max(x["histogram"])
        bars = "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in x["histogram"])
        print(
            f"{x['kind']:6} layer {x['layer']!s:>3} {x['length']:6} T={x['neighbours']:<3} "
            f"mean {x['mean']:6.2f} p10 {x['p10']:5.1f} p50 {x['p50']:5.1f} p90 {x['p90']:5.1f} "
            f"half {x['half']:5.2f} |{bars}|" + (f" below {x['below']:.1%}" if "below" in x else "")
        )


def main() -> int:
    """Measure, print a line per row and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--name", default="", help="of the model; the folder's by default")
    parser.add_argument("--texts", type=Path, nargs="+", help="UTF-8 files, long enough")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="in tokens")
    parser.add_argument(
        "--demo", type=Path, help="folder of the demo's model, trained if it is new"
    )
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if (options.model is None) != (options.texts is None):
        parser.error("--model and --texts: expected both or neither")
    found: dict[str, Any] = {
        "machine": asdict(describe_machine(torch.device("cpu"), options.commit))
    }
    if options.model is not None:
        found["model"] = measure_model(options)
        show(found["model"]["rows"])
    if options.demo is not None:
        found["demo"] = measure_demo(options.demo, DemoConfig())
        show(found["demo"]["rows"])
    options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

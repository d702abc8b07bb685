"""What learned patterns keep of the attention on held-out texts, against sinks and a window.

    python benchmarks/pattern_masses.py --csv pattern_masses.csv
    python benchmarks/pattern_masses.py --toy --csv /tmp/toy.csv         # seconds, random weights

Exact attention of some queries of each block over all keys says what every block holds: its
attention (``mass``), or the norm of what it adds to the output (``l2``).  Patterns of one size are
judged by the share of it that they keep on texts that they were not learned from, mean over heads:

- sinks and a window;
- the blocks that are heaviest on the learning texts, a budget shared by the heads of a layer;
- the same by distance: weights are averaged over all blocks as far from the diagonal;
- the blocks that are heaviest on the judged text itself, which no pattern can know.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from typing import Any

import torch
from learned_patterns import make_parser, prepare

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.models import observe_model
from sparsek_backend.patterns.training import ImportanceOptions, LearnedPattern, Pruning

MEASURES = ("mass", "l2")


class Watch:
    """The importance of a layer's blocks by every measure, text by text."""

    def __init__(self, config: Any, tokens: int, block_size: int, samples: int, texts: int) -> None:
        self.learners = [
            LearnedPattern(
                config.num_attention_heads, config.num_key_value_heads, tokens, block_size,
                heads="query", importance=ImportanceOptions(
                    measure=measure, samples=samples, reduction="mean", window=texts
                ),
            )
            for measure in MEASURES
        ]  # fmt: skip

    def observe(self, *inputs: Any) -> None:
        """Look at a batch of the layer."""
        for learner in self.learners:
            learner.observe(*inputs)

    @property
    def found(self) -> torch.Tensor:
        """``[measures, texts, heads, rows, columns]``."""
        return torch.stack([x.tracker.history for x in self.learners])


def rows(
    model: Any, learn: list[torch.Tensor], judge: list[torch.Tensor], options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """A row per pattern, size and measure."""
    size, tokens = options.block_size, judge[0].shape[1]
    watched = []
    for data in (learn, judge):
        layers = {
            layer: Watch(model.config, tokens, size, options.samples, len(data))
            for layer in range(model.config.num_hidden_layers)
        }
        observe_model(model.base_model, layers, data)  # without its logits
        watched.append(torch.stack([layers[layer].found for layer in range(len(layers))], 1))
    learned, held_out = watched[0].mean(2), watched[1]  # [measures, layers, (texts,) heads, R, C]
    blocks = learned.shape[-1]
    visible = torch.ones(blocks, blocks, dtype=torch.bool).tril()
    pooled, smoothed = Pruning(pooled=True), Pruning(pooled=True, by_distance=True)
    for window in options.windows:
        local = BlockSparsePattern.local((blocks, blocks), size, window=window, sinks=1)
        attended = local.num_blocks / int(visible.sum())

        def masks(
            weights: torch.Tensor, rule: Pruning = pooled, attended: float = attended
        ) -> torch.Tensor:
            flat = weights.flatten(0, -4)
            found = [rule.mask(x, visible, 1.0 - attended) for x in flat]
            return torch.stack(found).view(weights.shape)

        for index, measure in enumerate(MEASURES):
            weight, seen = learned[index], held_out[index]
            patterns = {
                "sinks and window": local.mask().expand(seen.shape),
                "learned": masks(weight)[:, None],
                "learned by distance": masks(weight, smoothed)[:, None],
                "of the text itself": masks(seen),
            }
            for name, mask in patterns.items():
                kept = (seen * mask).sum((-1, -2)) / seen.sum((-1, -2))
                yield {
                    "patterns": name, "measure": measure, "attended": round(attended, 4),
                    "kept": round(float(kept.mean()), 4), "tokens": tokens, "block_size": size,
                    "texts": len(judge),
                }  # fmt: skip


def main() -> int:
    """Measure, print a line per pattern and write them to a CSV."""
    parser = make_parser(__doc__.splitlines()[0])
    options = parser.parse_args()
    model, learn, judge, where = prepare(parser, options)
    texts = (list(x.values()) for x in (learn, judge))
    found = [row | where for row in rows(model, *texts, options)]
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    for row in found:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())

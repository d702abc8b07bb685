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

import torch
from learned_patterns import Subject, Watched, make_parser, prepare

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.training import Pruning


def rows(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row per pattern, size and measure."""
    size, judge = options.block_size, subject.judge
    tokens = next(iter(judge.values())).shape[1]
    watched = Watched(subject, size, options.samples, options.importance_dir)
    learned, held_out = (  # [measures, layers, (texts,) heads, R, C]
        torch.stack([watched.importance(x, options.measures) for x in texts], 2)
        for texts in (subject.learn, judge)
    )
    learned = learned.mean(2)
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

        for index, measure in enumerate(options.measures):
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
    parser.add_argument("--measures", nargs="+", choices=["mass", "l2"], default=["mass", "l2"])
    options = parser.parse_args()
    subject = prepare(parser, options)
    found = [row | subject.where for row in rows(subject, options)]
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    for row in found:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())

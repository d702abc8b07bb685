"""Perplexity of SmolLM2 when every layer attends a learned pattern, beside windows of equal size.

    python benchmarks/learned_patterns.py --csv learned_patterns.csv --figure learned_patterns.png

Patterns are learned from some texts of ``sparsek_backend.models`` and judged on others.  A row has
the share of the blocks under the diagonal that is listed, on average over layers and heads.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsek_backend.models import fetch_model, fetch_texts
from sparsek_backend.patterns import (
    BlockSparsePattern,
    attend_patterns,
    learn_model_patterns,
)

Patterns = Mapping[int, BlockSparsePattern]


def batches(tokenizer: Any, length: int, texts: slice, most: int) -> list[torch.Tensor]:
    """``[1, length]`` token ids: the start of each text that is long enough."""
    paths = sorted(fetch_texts().glob("*.txt"), key=lambda path: -path.stat().st_size)
    ids = (tokenizer(path.read_text()).input_ids[:length] for path in paths[texts])
    return [torch.tensor([x]) for x in ids if len(x) == length][:most]


def attended(patterns: Patterns) -> float:
    """Listed share of the blocks under the diagonal, the mean over layers and patterns."""
    shares = []
    for pattern in patterns.values():
        rows = pattern.shape[0]
        listed = pattern.mask().tril().sum() / pattern.num_patterns
        shares.append(float(listed) / (rows * (rows + 1) / 2))
    return sum(shares) / len(shares)


def perplexity(model: Any, data: list[torch.Tensor], patterns: Patterns | None) -> float:
    """Over all tokens of the data."""
    context = attend_patterns(model, patterns) if patterns is not None else nullcontext()
    with context, torch.no_grad():
        losses = [model(ids, labels=ids, use_cache=False).loss.item() for ids in data]
    return math.exp(sum(losses) / len(losses))


def local_patterns(learned: Patterns) -> Patterns:
    """The smallest window, with one block of sinks, that attends at least as much as learned."""
    pattern = next(iter(learned.values()))
    for window in range(1, pattern.shape[0] + 1):
        same = BlockSparsePattern.local(pattern.shape, pattern.block_size, window=window, sinks=1)
        found = dict.fromkeys(learned, same)
        if attended(found) >= attended(learned):
            break
    return found


def rows(
    model: Any,
    learn: list[torch.Tensor],
    judge: list[torch.Tensor],
    block_size: int,
    figure: Path | None,
) -> Iterator[dict[str, object]]:
    """A row per pattern; the figure is of the middle layer at a share of 0.9."""
    dense = perplexity(model, judge, None)
    common = {"tokens": judge[0].shape[1], "block_size": block_size, "texts": len(judge)}
    yield {"patterns": "dense", "share": "", **common, "attended": 1.0, "perplexity": dense}
    for share in (0.8, 0.9, 0.95, 0.99):
        learned = learn_model_patterns(model, learn, block_size=block_size, share=share)
        if figure is not None and share == 0.9:
            learned[len(learned) // 2].show().savefig(figure, dpi=110)
        for name, patterns in (("learned", learned), ("sinks and window", local_patterns(learned))):
            yield {
                "patterns": name,
                "share": share if name == "learned" else "",
                **common,
                "attended": round(attended(patterns), 4),
                "perplexity": perplexity(model, judge, patterns),
            }


def main() -> int:
    """Learn, judge, print a line per pattern and write them to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--learn", type=int, default=8, help="texts to learn from")
    parser.add_argument("--judge", type=int, default=8, help="texts to judge on")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--figure", type=Path, help="where to draw the patterns of a layer")
    arguments = parser.parse_args()
    folder = fetch_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    learn = batches(tokenizer, arguments.tokens, slice(0, None, 2), arguments.learn)
    judge = batches(tokenizer, arguments.tokens, slice(1, None, 2), arguments.judge)
    with arguments.csv.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows(model, learn, judge, arguments.block_size, arguments.figure):
            row["perplexity"] = round(float(str(row["perplexity"])), 3)
            print(row, flush=True)
            writer = writer or csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

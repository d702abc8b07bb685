"""Perplexity of SmolLM2 when every layer attends a learned pattern, or a window of the same size.

    python benchmarks/learned_patterns.py --csv learned_patterns.csv --figure learned_patterns.png

Patterns are learned from some texts of ``sparsek_backend.models``, pruned to as many blocks as a
window has, and judged on other texts.  ``attended`` is the share of the blocks under the diagonal.
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


def perplexity(model: Any, data: list[torch.Tensor], patterns: Patterns | None) -> float:
    """Over all tokens of the data."""
    context = attend_patterns(model, patterns) if patterns is not None else nullcontext()
    with context, torch.no_grad():
        losses = [model(ids, labels=ids, use_cache=False).loss.item() for ids in data]
    return math.exp(sum(losses) / len(losses))


def rows(
    model: Any,
    learn: list[torch.Tensor],
    judge: list[torch.Tensor],
    block_size: int,
    windows: list[int],
    figure: Path | None,
) -> Iterator[dict[str, object]]:
    """A row per pattern; the figure is of the middle layer at the size of the first window."""
    common = {"tokens": judge[0].shape[1], "block_size": block_size, "texts": len(judge)}
    dense = perplexity(model, judge, None)
    yield {"patterns": "dense", **common, "attended": 1.0, "perplexity": dense}
    everything = learn_model_patterns(model, learn, block_size=block_size, share=1.0)
    shape = everything[0].shape
    for window in windows:
        local = BlockSparsePattern.local(shape, block_size, window=window, sinks=1)
        pruned = {i: p.prune(density=local.density) for i, p in everything.items()}
        if figure is not None and window == windows[0]:
            pruned[len(pruned) // 2].show().savefig(figure, dpi=110)
        attended = round(local.num_blocks / (shape[0] * (shape[0] + 1) / 2), 4)
        same = dict.fromkeys(everything, local)
        for name, patterns in ((f"sinks and a window of {window}", same), ("learned", pruned)):
            found = perplexity(model, judge, patterns)
            yield {"patterns": name, **common, "attended": attended, "perplexity": found}


def main() -> int:
    """Learn, judge, print a line per pattern and write them to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8], help="in blocks")
    parser.add_argument("--learn", type=int, default=4, help="texts to learn from")
    parser.add_argument("--judge", type=int, default=4, help="texts to judge on")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--figure", type=Path, help="where to draw the patterns of a layer")
    arguments = parser.parse_args()
    folder = fetch_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    learn = batches(tokenizer, arguments.tokens, slice(0, None, 2), arguments.learn)
    judge = batches(tokenizer, arguments.tokens, slice(1, None, 2), arguments.judge)
    if not learn or not judge:
        parser.error(f"--tokens: too few texts have {arguments.tokens} tokens")
    with arguments.csv.open("w", newline="", encoding="utf-8") as file:
        writer = None
        sizes = (arguments.block_size, arguments.windows, arguments.figure)
        for row in rows(model, learn, judge, *sizes):
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

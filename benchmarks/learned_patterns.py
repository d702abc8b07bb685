"""Perplexity of a model when every layer attends a learned pattern, or a window of the same size.

    python benchmarks/learned_patterns.py --csv learned_patterns.csv --figure learned_patterns.png
    python benchmarks/learned_patterns.py --toy --csv /tmp/toy.csv       # seconds, random weights

Patterns are learned from some texts, have as many blocks as a window with one block of sinks, and
are judged on other texts.  ``attended`` is the share of the blocks under the diagonal; of adaptive
patterns it is counted while they are judged.  ``texts_won`` counts the texts on which a pattern
has a lower perplexity than the window of its size.

A rule is ``<measure>-<heads>[-pooled][-distance][-adaptive<K>]``: what is measured, who shares a
pattern, whether the heads of a layer share one budget, whether blocks as far from the diagonal
weigh the same, and whether each of K kinds of queries has its own pattern.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.models import fetch_model, fetch_texts
from sparsek_backend.patterns import BlockSparsePattern, attend_patterns, learned_patterns
from sparsek_backend.patterns.adaptive import AdaptiveLearner, AdaptivePattern
from sparsek_backend.patterns.models import observe_model
from sparsek_backend.patterns.training import ImportanceOptions, Pruning

Patterns = Mapping[int, BlockSparsePattern | AdaptivePattern]
RULES = ["mass-kv", "l2-kv", "l2-query-pooled", "l2-query-pooled-adaptive4"]


def batches(tokenizer: Any, length: int, texts: slice, most: int) -> list[torch.Tensor]:
    """``[1, length]`` token ids: the start of each text that is long enough."""
    paths = sorted(fetch_texts().glob("*.txt"), key=lambda path: -path.stat().st_size)
    ids = (tokenizer(path.read_text()).input_ids[:length] for path in paths[texts])
    return list(islice((torch.tensor([x]) for x in ids if len(x) == length), most))


def text_losses(model: Any, data: list[torch.Tensor], patterns: Patterns | None) -> list[float]:
    """The mean negative log-likelihood of each text's tokens."""
    context = attend_patterns(model, patterns) if patterns is not None else nullcontext()
    with context, torch.no_grad():
        losses = []
        for ids in data:
            ids = ids.to(model.device)
            losses.append(model(ids, labels=ids, use_cache=False).loss.item())
    return losses


def perplexity(losses: list[float]) -> float:
    """Over all tokens of texts of one length."""
    return math.exp(sum(losses) / len(losses))


class Lessons:
    """Patterns of a model by the texts to learn from; the model reads them once for each measure.

    Args:
        model: it attends everything meanwhile.
        learn: the texts.
        block_size: tokens along a side of a block.
        samples: queries of each block that are looked at.
    """

    def __init__(
        self, model: Any, learn: list[torch.Tensor], block_size: int, samples: int
    ) -> None:
        self.model, self.learn = model, learn
        self.block_size, self.samples = block_size, samples
        self._watched: dict[str, dict[int, Any]] = {}

    def _watch(self, measure: str, heads: str, adaptive: bool) -> dict[int, Any]:
        """By layer, what has seen the texts."""
        key = f"{measure} {heads} {adaptive}"
        if key not in self._watched:
            options = ImportanceOptions(
                measure=measure, samples=self.samples, reduction="mean", window=len(self.learn),  # type: ignore[arg-type]
            )  # fmt: skip
            config = self.model.config
            counts = {"kv": config.num_key_value_heads, "query": config.num_attention_heads}
            watched: dict[int, Any]
            if adaptive:
                watched = {
                    layer: AdaptiveLearner(
                        counts.get(heads, 1), self.block_size, importance=options
                    )
                    for layer in range(config.num_hidden_layers)
                }
            else:
                watched = learned_patterns(
                    self.model, self.learn[0].shape[1], self.block_size,
                    heads=heads, importance=options,  # type: ignore[arg-type]
                )  # fmt: skip
            observe_model(self.model, watched, self.learn)
            self._watched[key] = watched
        return self._watched[key]

    def patterns(self, rule: str, sparsity: float) -> Patterns:
        """Patterns by a rule, on the model's device."""
        measure, heads, *kind = rule.split("-")
        kinds = [int(x.removeprefix("adaptive")) for x in kind if x.startswith("adaptive")]
        pruning = Pruning(pooled="pooled" in kind, by_distance="distance" in kind)
        device = self.model.device
        watched = self._watch(measure, heads, bool(kinds))
        if kinds:
            return {
                layer: learner.pattern(sparsity, kinds[0], pruning=pruning).to(device)
                for layer, learner in watched.items()
            }
        found = {}
        for layer, seen in watched.items():
            mask = pruning.mask(seen.importance(), seen.visible, sparsity)
            found[layer] = BlockSparsePattern.from_mask(mask, self.block_size).to(device)
        return found


def rows(
    model: Any, learn: list[torch.Tensor], judge: list[torch.Tensor], options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """A row per pattern; the figure is of the middle layer at the size of the first window."""
    size = options.block_size
    lessons = Lessons(model, learn, size, options.samples)
    common = {"tokens": judge[0].shape[1], "block_size": size, "texts": len(judge)}
    dense = perplexity(text_losses(model, judge, None))
    yield {"patterns": "dense", **common, "attended": 1.0, "perplexity": dense, "texts_won": ""}
    blocks = -(-judge[0].shape[1] // size)
    visible = blocks * (blocks + 1) / 2
    for window in options.windows:
        local = BlockSparsePattern.local((blocks, blocks), size, window=window, sinks=1)
        attended = local.num_blocks / visible
        row: dict[str, object] = {**common, "attended": round(attended, 4)}
        same = dict.fromkeys(range(model.config.num_hidden_layers), local.to(model.device))
        bars = text_losses(model, judge, same)
        row |= {"perplexity": perplexity(bars), "texts_won": ""}
        yield {"patterns": f"sinks and a window of {window}", **row}
        for rule in options.rules:
            patterns = lessons.patterns(rule, 1.0 - attended)
            middle = patterns[len(patterns) // 2]
            wanted = (window, rule) == (options.windows[0], options.rules[0])
            if options.figure is not None and wanted and isinstance(middle, BlockSparsePattern):
                middle.show().savefig(options.figure, dpi=110)
            with counted(patterns) as listed:
                losses = text_losses(model, judge, patterns)
            row["perplexity"] = perplexity(losses)
            row["texts_won"] = sum(a < b for a, b in zip(losses, bars, strict=True))
            row["attended"] = round(attended, 4)
            if listed:
                row["attended"] = round(sum(listed) / len(listed) / visible, 4)
            yield {"patterns": f"learned, {rule}", **row}


@contextmanager
def counted(patterns: Patterns) -> Iterator[list[float]]:
    """Blocks that adaptive patterns attend, a number for each layer and text."""
    listed: list[float] = []
    hooks = [
        pattern.register_forward_pre_hook(
            lambda module, inputs: listed.append(
                module.mask(inputs[0]).sum((2, 3)).float().mean().item()
            )
        )
        for pattern in patterns.values()
        if isinstance(pattern, AdaptivePattern)
    ]
    try:
        yield listed
    finally:
        for hook in hooks:
            hook.remove()


def toy(options: argparse.Namespace) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A small random model and random texts: that the script runs, not what it finds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    texts = [torch.randint(97, (1, options.tokens)) for _ in range(options.learn + options.judge)]
    return LlamaForCausalLM(config), texts[: options.learn], texts[options.learn :]


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Options of a script that learns patterns from some texts and judges them on others."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; SmolLM2 by default")
    parser.add_argument("--toy", action="store_true", help="a random model of two layers")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 5], help="in blocks")
    parser.add_argument("--samples", type=int, default=16, help="queries of each block")
    parser.add_argument("--learn", type=int, default=4, help="texts to learn from")
    parser.add_argument("--judge", type=int, default=4, help="texts to judge on")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--csv", type=Path, required=True)
    return parser


class Subject(NamedTuple):
    """A model on its device, the texts, and the columns that tell where it was measured."""

    model: Any
    learn: list[torch.Tensor]
    judge: list[torch.Tensor]
    where: dict[str, str]


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Subject:
    """The model and texts of the options; their sizes are filled in."""
    options.tokens = options.tokens or (256 if options.toy else 2048)
    options.block_size = options.block_size or (16 if options.toy else 64)
    device = choose_device(options.device)
    if options.toy:
        model, learn, judge = toy(options)
    else:
        folder = options.model or fetch_model()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        learn = batches(tokenizer, options.tokens, slice(0, None, 2), options.learn)
        judge = batches(tokenizer, options.tokens, slice(1, None, 2), options.judge)
    if not learn or not judge:
        parser.error(f"--tokens: too few texts have {options.tokens} tokens")
    machine = describe_machine(device, options.commit)
    name = "toy" if options.toy else Path(folder).name
    where = {"model": name, "gpu": machine.gpu, "torch": machine.torch, "commit": machine.commit}
    return Subject(model.to(device).eval(), learn, judge, where)


def main() -> int:
    """Learn, judge, print a line per pattern and write them to a CSV."""
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--figure", type=Path, help="where to draw the patterns of a layer")
    options = parser.parse_args()
    model, learn, judge, where = prepare(parser, options)
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows(model, learn, judge, options):
            row["perplexity"] = round(float(str(row["perplexity"])), 3)
            print(row, flush=True)
            row |= where
            writer = writer or csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

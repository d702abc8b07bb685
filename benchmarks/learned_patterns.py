"""Perplexity of a model when every layer attends a learned pattern, or a window of the same size.

    python benchmarks/learned_patterns.py --csv learned_patterns.csv --figure learned_patterns.png
    python benchmarks/learned_patterns.py --toy --csv /tmp/toy.csv       # seconds, random weights
    python benchmarks/learned_patterns.py --csv F --texts-csv T          # goes on where it stopped

Patterns are learned from some texts, have as many blocks as a window with one block of sinks, and
are judged on other texts.  ``attended`` is the share of the blocks under the diagonal.
``texts_won`` counts the texts on which a pattern has a lower perplexity than the window of its
size.  ``--texts-csv`` keeps a line for each pattern and text; all patterns are judged on a text
before the next, so that a run may end with fewer texts.

A rule is ``<measure>-<heads>[-pooled|-model][-distance]``: what is measured, who shares a pattern,
whether the heads of a layer, or of all, share one budget, and whether blocks as far from the
diagonal weigh the same.  By the rule ``windows`` each head of the model has sinks and a window of
its own: those with the least error of outputs.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.models import fetch_model, fetch_texts
from sparsek_backend.patterns import BlockSparsePattern, attend_patterns, learned_patterns
from sparsek_backend.patterns.models import observe_model
from sparsek_backend.patterns.training import (
    ImportanceOptions,
    Pruning,
    WindowErrors,
    fit_windows,
    window_sizes,
)

Patterns = Mapping[int, BlockSparsePattern]
RULES = ["mass-kv", "l2-kv", "l2-query-pooled", "l2-query-model-distance"]


Texts = dict[str, torch.Tensor]
"""``[1, length]`` token ids by name."""
KEY = (
    "patterns", "window", "text", "tokens", "block_size", "learned_from", "samples", "model",
    "dtype",
)  # fmt: skip
"""What tells a cell from others."""


def batches(tokenizer: Any, length: int, texts: slice, most: int) -> Texts:
    """The start of each text that is long enough."""
    paths = sorted(fetch_texts().glob("*.txt"), key=lambda path: -path.stat().st_size)
    ids = ((path.stem, tokenizer(path.read_text()).input_ids[:length]) for path in paths[texts])
    long = ((name, torch.tensor([x])) for name, x in ids if len(x) == length)
    return dict(islice(long, most))


def text_loss(model: Any, ids: torch.Tensor, patterns: Patterns | None, step: int = 1024) -> float:
    """The mean negative log-likelihood of a text's tokens.

    Args:
        model: logits are what its output embeddings make of its last hidden states.
        ids: ``[1, N]``.
        patterns: by layer; everything is attended without.
        step: tokens whose logits are held at a time.
    """
    context = attend_patterns(model, patterns) if patterns is not None else nullcontext()
    ids = ids.to(model.device)
    with context, torch.no_grad():
        states = model.base_model(ids, use_cache=False).last_hidden_state[0, :-1]
        parts = zip(states.split(step), ids[0, 1:].split(step), strict=True)
        head = model.get_output_embeddings()
        losses = [F.cross_entropy(head(x).float(), y, reduction="sum").item() for x, y in parts]
    return sum(losses) / len(states)


def perplexity(losses: list[float]) -> float:
    """Over all tokens of texts of one length."""
    return math.exp(sum(losses) / len(losses))


class Watched:
    """How much each block of a text matters; measured once, where there is a folder also there.

    Args:
        subject: its model attends everything meanwhile.
        block_size: tokens along a side of a block.
        samples: queries of each block that are looked at.
        folder: for runs to come.
    """

    def __init__(
        self, subject: Subject, block_size: int, samples: int, folder: Path | None
    ) -> None:
        self.model, self.where, self.folder = subject.model, subject.where, folder
        self.texts = subject.learn | subject.judge
        self.block_size, self.samples = block_size, samples
        self._found: dict[str, torch.Tensor] = {}

    def importance(self, text: str, measures: Sequence[str]) -> torch.Tensor:
        """``[measures, layers, Hq, R, C]``; the text is read once for all measures.

        Of the measure ``windows``: ``[1, layers, Hq, W]``, what heads lose by windows.
        """
        missing = [x for x in measures if not self._known(self._name(text, x))]
        if missing:
            self._read(text, missing)
        return torch.stack([self._found[self._name(text, x)] for x in measures])

    def _name(self, text: str, measure: str) -> str:
        sizes = f"{self.texts[text].shape[1]}_{self.block_size}_{self.samples}"
        name = f"{self.where['model']}_{self.where['dtype']}_{text}_{sizes}_{measure}"
        return name.replace(" ", "_")

    def _known(self, name: str) -> bool:
        path = self.folder / f"{name}.pt" if self.folder is not None else None
        if name not in self._found and path is not None and path.exists():
            self._found[name] = torch.load(path, weights_only=True)
        return name in self._found

    def _read(self, text: str, measures: list[str]) -> None:
        config, ids = self.model.config, self.texts[text]
        layers = range(config.num_hidden_layers)
        watched: dict[str, dict[int, Any]] = {}
        for measure in measures:
            if measure == "windows":
                sizes = window_sizes(ids.shape[1], self.block_size)
                watched[measure] = {
                    x: WindowErrors(sizes, self.block_size, samples=self.samples) for x in layers
                }
                continue
            options = ImportanceOptions(
                measure=measure, samples=self.samples, reduction="mean", window=1,  # type: ignore[arg-type]
            )  # fmt: skip
            watched[measure] = learned_patterns(
                self.model, ids.shape[1], self.block_size, heads="query", importance=options
            )
        observers = {
            layer: partial(show_each, [x[layer] for x in watched.values()]) for layer in layers
        }
        observe_model(self.model.base_model, observers, [ids])  # without its logits
        for measure, seen in watched.items():
            name = self._name(text, measure)
            read = "shares" if measure == "windows" else "importance"
            self._found[name] = torch.stack([getattr(seen[x], read)().cpu() for x in layers])
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                torch.save(self._found[name], self.folder / f"{name}.pt")
        print(f"read {text}", flush=True)


def show_each(learners: list[Any], *inputs: Any) -> None:
    """Show a batch to the learners of one layer."""
    for learner in learners:
        learner.observe(*inputs)


class Lessons:
    """Patterns of a model by the texts to learn from.

    Args:
        subject: its model attends everything meanwhile.
        options: of the command line.
    """

    def __init__(self, subject: Subject, options: argparse.Namespace) -> None:
        self.model, self.learn = subject.model, subject.learn
        self.block_size, self.samples = options.block_size, options.samples
        self.watched = Watched(subject, self.block_size, self.samples, options.importance_dir)
        self._made: dict[tuple[str, int], Patterns] = {}

    def _patterns_of(self, heads: str) -> int:
        config = self.model.config
        return {"kv": config.num_key_value_heads, "query": config.num_attention_heads}.get(heads, 1)

    def patterns(self, rule: str, window: int, sparsity: float) -> Patterns:
        """Patterns by a rule for the size of a window, on the model's device; made once."""
        if (rule, window) not in self._made:
            self._made[rule, window] = {
                layer: x.to(self.model.device) for layer, x in self._make(rule, sparsity).items()
            }
        return self._made[rule, window]

    def _make(self, rule: str, sparsity: float) -> Patterns:
        measure, _, rest = rule.partition("-")
        heads, *kind = rest.split("-")
        pooled: Any = "model" if "model" in kind else "pooled" in kind
        pruning = Pruning(pooled=pooled, by_distance="distance" in kind)
        seen = torch.stack([self.watched.importance(x, [measure])[0] for x in self.learn]).mean(0)
        if measure == "windows":
            length = next(iter(self.learn.values())).shape[1]
            sizes = window_sizes(length, self.block_size)
            errors = dict(enumerate(seen))
            return fit_windows(errors, sizes, length, self.block_size, sparsity=sparsity)
        seen = seen.unflatten(1, (self._patterns_of(heads), -1)).mean(2)  # [layers, P, R, C]
        visible = torch.ones(seen.shape[2:], dtype=torch.bool).tril()
        masks = pruning.masks(list(seen), [visible] * len(seen), sparsity)
        return {
            layer: BlockSparsePattern.from_mask(mask, self.block_size)
            for layer, mask in enumerate(masks)
        }


class Cell(NamedTuple):
    """What a pattern attends of a text, and the loss on it."""

    attended: float
    loss: float


class Cells:
    """A cell for each pattern and text; where there is a file, those that it has are taken from it.

    Args:
        path: a CSV, written as cells are measured.
        where: columns that tell where it is measured, the model and its dtype among them.
    """

    def __init__(self, path: Path | None, where: dict[str, str]) -> None:
        self.path, self.where = path, where
        self.found: dict[tuple[str, ...], Cell] = {}
        if path is not None and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    cell = Cell(float(row["attended"]), float(row["loss"]))
                    self.found[tuple(row[x] for x in KEY)] = cell

    def get(self, key: dict[str, object], measure: Callable[[], Cell]) -> Cell:
        """The cell of a key, measured where it is new."""
        row = key | self.where
        name = tuple(str(row[x]) for x in KEY)
        if name not in self.found:
            attended, loss = measure()
            self.found[name] = Cell(round(attended, 4), round(loss, 6))
            self._add(key | self.found[name]._asdict() | self.where)
        return self.found[name]

    def _add(self, row: dict[str, object]) -> None:
        print(row["text"], row["patterns"], row["window"], row["loss"], flush=True)
        if self.path is None:
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)


class Judged:
    """Patterns, windows and everything on the texts to judge on.

    Args:
        subject: the model and the texts.
        options: of the command line.
    """

    def __init__(self, subject: Subject, options: argparse.Namespace) -> None:
        self.model, self.judge = subject.model, subject.judge
        self.options = options
        self.tokens = next(iter(self.judge.values())).shape[1]
        self.blocks = -(-self.tokens // options.block_size)
        self.visible = self.blocks * (self.blocks + 1) // 2
        self.cells = Cells(options.texts_csv, subject.where)
        self.lessons = Lessons(subject, options)

    def local(self, window: int) -> BlockSparsePattern:
        """Sinks and a window."""
        shape = (self.blocks, self.blocks)
        return BlockSparsePattern.local(shape, self.options.block_size, window=window, sinks=1)

    def learned(self, rule: str, window: int) -> Patterns:
        """As large as sinks and a window."""
        sparsity = 1.0 - self.local(window).num_blocks / self.visible
        return self.lessons.patterns(rule, window, sparsity)

    def cell(self, text: str, window: int, rule: str) -> Cell:
        """Of a text: by a rule, else of a window, else of everything."""
        key = {
            "patterns": _name(window, rule), "window": window or "", "text": text,
            "tokens": self.tokens, "block_size": self.options.block_size,
            "learned_from": len(self.lessons.learn) if rule else "",
            "samples": self.options.samples if rule else "",
        }  # fmt: skip
        return self.cells.get(key, partial(self._measure, text, window, rule))

    def _measure(self, text: str, window: int, rule: str) -> Cell:
        if not window:
            return Cell(1.0, text_loss(self.model, self.judge[text], None))
        local = self.local(window).to(self.model.device)
        patterns: Patterns = dict.fromkeys(range(self.model.config.num_hidden_layers), local)
        if rule:
            patterns = self.learned(rule, window)
        listed = [x.num_blocks / x.num_patterns for x in patterns.values()]
        loss = text_loss(self.model, self.judge[text], patterns)
        return Cell(sum(listed) / len(listed) / self.visible, loss)


def _name(window: int, rule: str) -> str:
    return f"learned, {rule}" if rule else f"sinks and a window of {window}" if window else "dense"


def rows(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row per pattern, over all texts; the figure is of the middle layer at the first window."""
    judged = Judged(subject, options)
    if options.figure is not None:
        patterns = judged.learned(options.rules[0], options.windows[0])
        patterns[len(patterns) // 2].show().savefig(options.figure, dpi=110)
    texts = list(judged.judge)
    arms = [(0, "")] + [(x, rule) for x in options.windows for rule in ("", *options.rules)]
    for text in texts:
        for window, rule in arms:
            judged.cell(text, window, rule)
    for window, rule in arms:
        cells, bars = ([judged.cell(x, window, y) for x in texts] for y in (rule, ""))
        won = sum(a.loss < b.loss for a, b in zip(cells, bars, strict=True))
        yield {
            "patterns": _name(window, rule), "tokens": judged.tokens,
            "block_size": options.block_size, "texts": len(texts),
            "attended": round(sum(x.attended for x in cells) / len(cells), 4),
            "perplexity": round(perplexity([x.loss for x in cells]), 3),
            "texts_won": won if rule else "",
        }  # fmt: skip


def toy(options: argparse.Namespace) -> tuple[Any, Texts, Texts]:
    """A small random model and random texts: that the script runs, not what it finds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    learn, judge = (
        {f"{kind} {n}": torch.randint(97, (1, options.tokens)) for n in range(count)}
        for kind, count in (("learn", options.learn), ("judge", options.judge))
    )
    return LlamaForCausalLM(config), learn, judge


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
    parser.add_argument(
        "--importance-dir", type=Path, help="keeps what is learned of each text for runs to come"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU by default"
    )
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--csv", type=Path, required=True)
    return parser


class Subject(NamedTuple):
    """A model on its device, the texts, and the columns that tell where it was measured."""

    model: Any
    learn: Texts
    judge: Texts
    where: dict[str, str]


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Subject:
    """The model and texts of the options; their sizes are filled in."""
    options.tokens = options.tokens or (256 if options.toy else 2048)
    options.block_size = options.block_size or (16 if options.toy else 64)
    device = choose_device(options.device)
    dtype = options.dtype or (
        "bfloat16" if device.type == "cuda" and not options.toy else "float32"
    )
    if options.toy:
        model, learn, judge = toy(options)
    else:
        folder = options.model or fetch_model()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        learn = batches(tokenizer, options.tokens, slice(0, None, 2), options.learn)
        judge = batches(tokenizer, options.tokens, slice(1, None, 2), options.judge)
    if not learn or not judge:
        parser.error(f"--tokens: too few texts have {options.tokens} tokens")
    machine = describe_machine(device, options.commit)
    name = "toy" if options.toy else Path(folder).name
    where = {
        "model": name, "dtype": dtype, "gpu": machine.gpu, "torch": machine.torch,
        "commit": machine.commit,
    }  # fmt: skip
    return Subject(model.to(device, getattr(torch, dtype)).eval(), learn, judge, where)


def main() -> int:
    """Learn, judge, print a line per pattern and write them to a CSV."""
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--figure", type=Path, help="where to draw the patterns of a layer")
    parser.add_argument("--texts-csv", type=Path, help="a line for each pattern and text")
    options = parser.parse_args()
    subject = prepare(parser, options)
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows(subject, options):
            print(row, flush=True)
            row |= subject.where
            writer = writer or csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

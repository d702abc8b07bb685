"""`sparsek patterns`: learn, show, measure and convert patterns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console
from rich.markup import escape

from sparsek_backend.command_line import (
    check_each,
    commands,
    failing_on,
    grouped,
    token_option,
    whole_table,
)
from sparsek_backend.extras import needing
from sparsek_backend.machine import choose_device
from sparsek_backend.models import check_model, fetch_texts
from sparsek_backend.patterns.masses import Measure
from sparsek_backend.patterns.tools.convert import read_patterns, write_patterns
from sparsek_backend.patterns.tools.page import COLUMNS, write_page
from sparsek_backend.patterns.tools.statistics import pattern_statistics
from sparsek_backend.patterns.training.learned import Heads, ImportanceOptions
from sparsek_backend.patterns.training.pruning import Pruning
from sparsek_kernels.block_sparse.structure import check_block_size

app = commands("Block-sparse patterns: learn, show, measure, convert.")
File = Annotated[Path, typer.Argument(help="A pattern file (.safetensors, or .npz of scipy).")]
HeadDim = Annotated[int, typer.Option(min=1, help="Elements of a head, for the FLOPs.")]
BlockSize = Annotated[
    int | None, typer.Option(help="Tokens along a side of a block, for files that do not say it.")
]


_mendable = partial(failing_on, ValueError, TypeError, NotImplementedError, ImportError, OSError)
PRESETS = {"default": (32, 0.90), "large_graph": (64, 0.95), "high_accuracy": (16, 0.80)}
"""Block sizes and sparsities that go together."""


@dataclass(frozen=True)
class Goal:
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "default"
    block_size: Annotated[int | None, typer.Option(help="In place of the preset's.")] = None
    sparsity: Annotated[float | None, typer.Option(help="In place of the preset's.")] = None
    sinks: Annotated[int, typer.Option(help="First key blocks, which stay.")] = 1
    window: Annotated[int, typer.Option(help="Latest key blocks, which stay.")] = 1
    pooled: Annotated[bool, typer.Option(help="Heads of a layer share one budget of blocks.")] = (
        False
    )
    model_budget: Annotated[
        bool, typer.Option(help="Heads of all layers share one budget of blocks.")
    ] = False
    by_distance: Annotated[
        bool, typer.Option(help="Blocks as far from the diagonal have one weight, their mean.")
    ] = False
    windows: Annotated[
        bool,
        typer.Option(
            help="Sinks and a window for each query head: of all that keep the sparsity those "
            "with the least error of outputs."
        ),
    ] = False


@dataclass(frozen=True)
class Way:
    heads: Annotated[str, typer.Option(help="Who shares a pattern: kv, query or all.")] = "kv"
    measure: Annotated[
        str, typer.Option(help="What a block matters by: mass (attention), or l1 or l2 (output).")
    ] = "l2"
    samples: Annotated[int, typer.Option(help="Queries of each block that are looked at.")] = 4


@app.command()
@grouped
def learn(
    model: Annotated[str, typer.Argument(help="A Transformers model: a folder or a name.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    goal: Goal,
    way: Way,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files; repeatable. The speeches by default.")
    ] = None,
    tokens: Annotated[int, token_option("Tokens of each text.")] = 2048,
    texts: Annotated[int, typer.Option(min=1, help="Most texts to read.")] = 8,
    device: Annotated[str, typer.Option(help="`cuda`, `cpu` or `auto`.")] = "auto",
    prefill: Annotated[
        bool,
        typer.Option(
            help="For vLLM's mode `pattern`: ranked vertical blocks and slashes, which fit any "
            "length and number of blocks. Blocks have 64 tokens by default."
        ),
    ] = False,
) -> None:
    """Learn a pattern for each layer from what a model attends."""
    with _mendable():
        check_each("--preset", [goal.preset], PRESETS)
        check_each("--heads", [way.heads], get_args(Heads))
        check_each("--measure", [way.measure], get_args(Measure))
        if goal.block_size is not None:
            check_block_size(goal.block_size)
        preset, heads, measure = goal.preset, cast(Heads, way.heads), cast(Measure, way.measure)
        shared = goal.pooled or goal.model_budget or goal.by_distance
        unread = goal.window != 1 or measure != "l2"
        if goal.windows and (shared or prefill or heads == "all" or unread):
            raise ValueError(
                "--windows: expected neither --pooled, --model-budget, --by-distance, --prefill, "
                "--window, --measure nor --heads all, because every query head has its own window, "
                "by the error of its output"
            )
        if prefill and (
            heads != "kv" or shared or goal.sparsity is not None or preset != "default"
        ):
            raise ValueError(
                "--prefill: expected neither --heads, --pooled, --model-budget, --by-distance, "
                "--preset nor --sparsity, because a server decides how many blocks each KV head "
                "attends"
            )
        if out.suffix != ".safetensors" or not out.parent.is_dir():
            raise ValueError(
                f"--out: expected a file named .safetensors in a folder that exists, got {out}"
            )
        where = choose_device(device)
        loaded, batches = _load(model, text, tokens, texts, where)
        typer.echo(f"learning from {len(batches)} texts of {tokens} tokens on {where}", err=True)
        from sparsek_backend.patterns.models import learn_model_patterns
        from sparsek_backend.patterns.tools.learning import (
            learn_prefill_pattern,
            learn_window_patterns,
        )

        importance = ImportanceOptions(
            measure=measure, samples=way.samples, reduction="mean", window=len(batches)
        )
        kept = {"sinks": goal.sinks, "window": goal.window}
        if prefill:
            size = goal.block_size or 64
            learn_prefill_pattern(
                loaded, batches, block_size=size, importance=importance, name=model, **kept
            ).save(out)
            typer.echo(f"wrote {out}: for prefills, learned from {len(batches)} texts")
            return
        of_model: dict[str, Any] = {
            "block_size": goal.block_size or PRESETS[preset][0],
            "sparsity": PRESETS[preset][1] if goal.sparsity is None else goal.sparsity,
            "name": model,
        }
        if goal.windows:
            found = learn_window_patterns(
                loaded, batches, sinks=goal.sinks, samples=way.samples, **of_model
            )
        else:
            pooled: Any = "model" if goal.model_budget else goal.pooled
            pruning = Pruning(pooled=pooled, by_distance=goal.by_distance, **kept)
            found = learn_model_patterns(
                loaded, batches, heads=heads, importance=importance, pruning=pruning, **of_model
            )
        found.save(out)
    typer.echo(f"wrote {out}: {len(found.patterns)} layers, learned from {len(batches)} texts")


@app.command()
def show(
    file: File,
    out: Annotated[Path, typer.Option(help="Folder for the figures and the page.")],
    block_size: BlockSize = None,
    head_dim: HeadDim = 64,
) -> None:
    """Draw heat maps: a PNG for each layer, and one HTML page with all."""
    with _mendable():
        written = write_page(read_patterns(file, block_size=block_size), out, head_dim=head_dim)
    typer.echo(f"wrote {written[-1]} and {len(written) - 1} figures")


@app.command()
def stats(
    file: File,
    block_size: BlockSize = None,
    head_dim: HeadDim = 64,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with histograms.")] = False,
) -> None:
    """Print density, blocks per row, bytes and FLOPs by layer."""
    with _mendable():
        patterns = read_patterns(file, block_size=block_size)
        layers = patterns.patterns.items()
        found = {layer: pattern_statistics(x, head_dim=head_dim) for layer, x in layers}
    if as_json:
        names = ("model", "sparsity", "block_size", "shape")
        about: dict[str, Any] = {name: getattr(patterns, name) for name in names}
        about["layers"] = {layer: asdict(statistics) for layer, statistics in found.items()}
        typer.echo(json.dumps(about))
        return
    table = whole_table("layer", *COLUMNS, title=escape(patterns.model) or None)
    for layer, statistics in found.items():
        table.add_row(str(layer), *(text(statistics) for text in COLUMNS.values()))
    Console().print(table)


@app.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="The file to write: .safetensors or .npz.")],
    layer: Annotated[int | None, typer.Option(help="This layer alone.")] = None,
    head: Annotated[int, typer.Option(help="The pattern of an .npz file.")] = 0,
    block_size: BlockSize = None,
) -> None:
    """Convert between files of a model, a layer, and scipy."""
    with _mendable():
        write_patterns(read_patterns(file, block_size=block_size), out, layer=layer, head=head)
    typer.echo(f"wrote {out}")


def _load(
    name: str, paths: list[Path] | None, tokens: int, most: int, device: torch.device
) -> tuple[Any, list[torch.Tensor]]:
    """The model, and ``[1, tokens]`` ids of the texts that are long enough."""
    check_model(name)
    with needing("learning needs Transformers", extra="eval,patterns"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = paths or sorted(fetch_texts().glob("*.txt"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    batches: list[torch.Tensor] = []
    for path in paths:
        if len(batches) == most:
            break
        words = path.read_text(encoding="utf-8", errors="replace")
        ids = tokenizer(words, verbose=False).input_ids[:tokens]
        if len(ids) == tokens:
            batches.append(torch.tensor([ids]))
    if not batches:
        raise ValueError(f"--tokens: expected texts of at least {tokens} tokens, got none")
    return model.to(device).eval(), batches

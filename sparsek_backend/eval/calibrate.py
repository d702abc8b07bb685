"""`sparsek calibrate`: budgets for each layer and KV head of a model, the mean unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sparsek_backend import __version__
from sparsek_backend.command_line import failing_on
from sparsek_backend.eval.allocation import levels_of, missed_of, share_out
from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.curves import Curves, measure_curves
from sparsek_backend.eval.layers import LayerReader
from sparsek_backend.eval.prompt_file import load_prompts
from sparsek_backend.eval.tasks import check_tasks, make_prompts
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.layer_budgets import LayerBudgets

TASKS_READ = ("multi_key", "records", "variable_tracking", "continuation")
"""Tasks whose prompts are read by default: each looks for its answer in another way."""
LENGTH_ON_GPU, LENGTH_ON_CPU = 16384, 4096

app = typer.Typer(rich_markup_mode=None, add_completion=False)
console = Console()


@dataclass(frozen=True)
class Calibration:
    """Missed mass of a model's heads, with the settings and prompts that it was measured with.

    Args:
        model: its name in files.
        shape: layers and KV heads.
        budget: what was measured.
        made_by: prompts and seed.
    """

    model: str
    shape: tuple[int, int]
    budget: Budget
    curves: Curves
    made_by: dict[str, Any]

    def budgets(self, mean: int, by: str) -> LayerBudgets:
        """The file of budgets for a mean.

        Args:
            by: ``head``, or ``layer`` for equal budgets within a layer.
        """
        top_k = share_out(self.curves, mean, by=by)
        equal = {layer: [mean] * len(heads) for layer, heads in top_k.items()}
        return LayerBudgets.make(
            top_k=top_k,
            model=self.model,
            num_hidden_layers=self.shape[0],
            num_key_value_heads=self.shape[1],
            sel_block_size=self.budget.config.sel_block_size,
            made_by={
                **self.made_by,
                "by": by,
                "missed_equal": round(missed_of(self.curves, equal), 6),
                "missed": round(missed_of(self.curves, top_k), 6),
            },
        )


def read_prompts(
    model: str, *, tasks: Sequence[str], length: int, count: int, seed: int, file: Path | None
) -> list[list[int]]:
    """Token ids of the prompts to read.

    Raises:
        ValueError: the model has no tokenizer, or the file has no such prompts.
    """
    if file is None:
        made = make_prompts(
            HubTokenizer(model),
            tasks=tasks,
            variants=["plain"],
            lengths=[length],
            count=count,
            seed=seed,
        )
        return [prompt.ids for prompt in made]
    found = [
        prompt.ids
        for prompt in load_prompts(file).prompts
        if (prompt.variant, prompt.length) == ("plain", length)
        and prompt.task in tasks
        and prompt.index < count
    ]
    if not found:
        raise ValueError(
            f"prompts: expected variant plain of {', '.join(tasks)} with {length} tokens, got none"
        )
    return found


def measure(
    model: str, prompts: Sequence[Sequence[int]], budget: Budget, levels: Sequence[int], **made: Any
) -> Calibration:
    """Measure a model's curves, with a progress bar.

    Args:
        levels: budgets to measure.
        made: what says how the prompts were made.

    Raises:
        ValueError: the budget does not select blocks, or covers a prompt.
    """
    if not budget.policy().selects_blocks:
        raise ValueError(f"budget: expected one that selects blocks, got {budget.label!r}")
    with console.status("loading the model"):
        reader = LayerReader(model)
    progress = Progress(
        TextColumn("measuring {task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} layers"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        bar = progress.add_task(Path(model).name, total=reader.shape[0] * len(prompts))
        curves = measure_curves(
            reader, prompts, budget.policy(), levels, on_layer=lambda: progress.advance(bar)
        )
    made_by = {"sparsek": __version__, "budget": budget.label, "prompts": len(prompts), **made}
    return Calibration(Path(model).name, reader.shape, budget, curves, made_by)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("budgets.json"),
    budget: Annotated[
        str, typer.Option(help="A block_topk budget: the mean that is shared out.")
    ] = "block_topk:32",
    by: Annotated[
        str, typer.Option(help="head: a budget for each KV head; layer: equal within a layer.")
    ] = "head",
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of a prompt; by default {LENGTH_ON_GPU} with a GPU, {LENGTH_ON_CPU} "
            "without."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"Tasks to read. Repeatable; by default {', '.join(TASKS_READ)}."),
    ] = None,
    prompts_per_task: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of plain prompts, for a model without a tokenizer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
) -> None:
    """Write budgets for each layer and KV head: more where selection misses more.

    The model reads synthetic prompts through Transformers, on a GPU if there is one; nothing is
    trained. Serve with --additional-config '{"sparsek": {"budgets": "budgets.json"}}'.
    """
    with failing_on(ValueError, ImportError, RuntimeError, OSError):
        tasks = tuple(task or TASKS_READ)
        check_tasks(tasks)
        if by not in ("head", "layer"):
            raise ValueError(f"by: expected head or layer, got {by!r}")
        chosen = parse_budget(budget)
        mean = chosen.config.top_k
        tokens = length or (LENGTH_ON_GPU if torch.cuda.is_available() else LENGTH_ON_CPU)
        ids = read_prompts(
            model, tasks=tasks, length=tokens, count=prompts_per_task, seed=seed, file=prompts
        )
        made = {"tasks": list(tasks), "length": tokens, "seed": seed}
        found = measure(model, ids, chosen, levels_of(mean), **made).budgets(mean, by)
        found.save(out)
    numbers = [number for heads in found.top_k.values() for number in heads]
    console.print(
        f"missed mass: {found.made_by['missed_equal']:.4f} with {mean} blocks everywhere, "
        f"{found.made_by['missed']:.4f} with {min(numbers)} to {max(numbers)}"
    )
    console.print(f"wrote {out}")

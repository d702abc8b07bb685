"""`sparsek tune`: the cheapest `top_k` and `decode_tokens` whose answers stay within a loss."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console

from sparsek_backend.command_line import commands, fail, failing_on, grouped
from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.cli import run_all, take_prompts
from sparsek_backend.eval.options import EngineOptions, PromptOptions
from sparsek_backend.eval.prompt_file import keep_prompts
from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import worst_row
from sparsek_backend.eval.runs import LocalModel, Workplace
from sparsek_backend.eval.tables import tuning_table

SIZES = (4, 8, 16, 32, 64, 128)
_SIZES = ", ".join(map(str, SIZES))
app = commands()
console = Console()


def cost_of(budget: Budget, lengths: Sequence[int]) -> float:
    """Attended share, mean of prefill and decode and of some lengths."""
    return fmean(budget.prefill_share(n) + budget.decode_share(n) for n in lengths) / 2


def pair(prompts: int, decodes: int) -> str:
    """The budget of so many blocks for prompts, and as many tokens as so many for decoded ones."""
    return f"block_topk:{prompts},decode_tokens={64 * decodes}"


def cheapest(
    sizes: Sequence[int], cost: Callable[[Budget], float], holds: Callable[[Budget], bool]
) -> Budget | None:
    """The cheapest pair that holds, where more of either holds too.

    It walks along the border of what holds, and asks less than twice for each size.
    """
    best, prompts, decodes = None, sorted(sizes), sorted(sizes)
    while prompts and decodes:
        budget = parse_budget(pair(prompts[-1], decodes[0]))
        if best is not None and cost(budget) >= cost(best):
            prompts.pop()
        elif holds(budget):
            best = budget
            prompts.pop()
        else:
            decodes.pop(0)
    return best


@app.command()
@grouped
def tune(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    *,
    loss: Annotated[
        float, typer.Option(help="Most nats a token by which right answers may become less likely.")
    ] = 0.01,
    size: Annotated[
        list[int] | None,
        typer.Option(help=f"Blocks of 64 tokens to try. Repeatable; by default {_SIZES}."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of `sparsek eval prompts`.")] = None,
    asked: PromptOptions,
    engine: EngineOptions,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("tune-results"),
) -> None:
    """Search the cheapest budget whose answers stay within a loss.

    It tries pairs of `top_k`, for prompts, and `decode_tokens`. A pair holds where the upper end of
    the 95 % interval of what right answers lose is within --loss. Prints the cheapest that holds as
    `--additional-config`. The same command continues an interrupted search.
    """
    tried: list[tuple[Budget, Row]] = []
    with failing_on(ValueError, ImportError, RuntimeError, OSError):
        if not math.isfinite(loss):
            raise ValueError(f"loss: expected a finite number, got {loss}")
        asked.check(prompts)
        asks = take_prompts(prompts, asked, model)
        kinds = Counter((one.task, one.variant, one.length) for one in asks.prompts)
        if (fewest := min(kinds.values(), default=0)) < 2:  # an interval of one has no width
            raise ValueError(f"samples: expected at least 2 prompts each, got {fewest}")
        lengths = sorted({prompt.length for prompt in asks.prompts})
        some = {k: parse_budget(pair(k, k)) for k in size or SIZES}
        sizes = [k for k, budget in some.items() if budget.decode_share(lengths[0]) < 1.0]
        if not sizes:
            raise ValueError(f"size: expected one that leaves something out of {lengths[0]} tokens")
        place = Workplace(asks, keep_prompts(out / "tune", asks), out / "tune.jsonl")
        local = LocalModel(model, engine.arguments())

        def score(budget: Budget) -> str:
            return run_all(asks, [(budget.label, partial(local.run, budget, place))])[0]

        def holds(budget: Budget) -> bool:
            worst = worst_row(place.record, asks.prompts, reference, score(budget))
            tried.append((budget, worst))
            return float(worst["delta_nll_high"]) <= loss

        reference = score(parse_budget("dense"))
        best = cheapest(sizes, lambda budget: cost_of(budget, lengths), holds)
    console.print(tuning_table(tried, lengths[-1], loss))
    if best is None:
        raise fail(f"nothing holds a loss of {loss:g}; allow more, or ask more prompts")
    found = {"top_k": best.config.top_k, "decode_tokens": best.config.decode_tokens}
    console.print(f"cheapest that hold {loss:g}: {best.label}")
    console.print(f"--additional-config '{json.dumps({'sparsek': found})}'", soft_wrap=True)

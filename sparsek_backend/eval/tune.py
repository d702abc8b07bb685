"""`sparsek tune`: the cheapest settings whose answers stay within a loss."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from sparsek_backend.command_line import failing_on, grouped, refuse_set
from sparsek_backend.eval.allocation import levels_of
from sparsek_backend.eval.budgets import DENSE, Budget, parse_budget
from sparsek_backend.eval.calibrate import TASKS_READ, measure, read_prompts
from sparsek_backend.eval.cli import EngineOptions, QuestionArguments
from sparsek_backend.eval.prompt import Prompt
from sparsek_backend.eval.prompt_file import load_prompts, save_prompts
from sparsek_backend.eval.record import identity, prompt_row, read_rows
from sparsek_backend.eval.results import collect_runs, retrieval_rows
from sparsek_backend.eval.runs import LocalModel, Workplace
from sparsek_backend.eval.search import cheapest, cost_of, worst_loss
from sparsek_backend.eval.stats import Interval
from sparsek_backend.eval.tokenizer import HubTokenizer

SIZES = (4, 8, 16, 32, 64, 128)

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, context_settings={"max_content_width": 100}
)
console = Console()


class Trials:
    """Budgets measured against dense attention, each once.

    Args:
        local: the model.
        place: prompts and record.
        limit: most added NLL.
    """

    def __init__(self, local: LocalModel, place: Workplace, limit: float) -> None:
        self._local, self._place, self._limit = local, place, limit
        self.losses: dict[str, Interval] = {}
        self.tried: list[Budget] = []
        self._asked = {identity(prompt_row(prompt)) for prompt in place.prompts.prompts}
        self._reference = self._run(DENSE)

    def holds(self, budget: Budget) -> bool:
        """Whether the upper end of the loss's interval is within the limit."""
        if budget.label not in self.losses:
            key = self._run(budget)
            found = collect_runs(read_rows(self._place.record), [self._reference, key])
            # The record may hold prompts of an earlier search too.
            runs = [
                replace(run, rows=[row for row in run.rows if identity(row) in self._asked])
                for run in found
            ]
            self.losses[budget.label] = worst_loss(retrieval_rows(runs), budget.label)
            self.tried.append(budget)
        return self.losses[budget.label].high <= self._limit

    def _run(self, budget: Budget) -> str:
        with console.status(f"{budget.label}: starting") as status:
            return self._local.run(
                budget,
                self._place,
                lambda count, what: status.update(f"{budget.label}: {what}"),
            )


@app.command()
@grouped
def tune(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    *,
    loss: Annotated[
        float, typer.Option(help="Most added NLL of the right answers, nats per token.")
    ] = 0.01,
    size: Annotated[
        list[int] | None,
        typer.Option(help=f"top_k to try. Repeatable; by default {', '.join(map(str, SIZES))}."),
    ] = None,
    dense_last: Annotated[
        list[int] | None, typer.Option(help="dense_last to try. Repeatable; by default 64 and 0.")
    ] = None,
    calibrated: Annotated[
        bool,
        typer.Option(
            "--calibrated/--equal", help="Also try budgets per layer and KV head, or not."
        ),
    ] = True,
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt file, for a model without a tokenizer.")
    ] = None,
    asked: QuestionArguments,
    engine: EngineOptions,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("tune-results"),
    commit: Annotated[str, typer.Option(help="Commit to record where there is no git.")] = "",
) -> None:
    """Search settings by the NLL of right answers, and print the cheapest that hold.

    Settings hold where the upper end of the 95 % interval is within --loss.  The same command
    continues an interrupted search.
    """
    with failing_on(ValueError, ImportError, RuntimeError, OSError):
        file = prompts or out / "prompts.json.gz"
        if prompts is not None:
            refuse_set(asked, "prompts: the file has the prompts")
        else:
            options = asked.checked()
            found = options.make(HubTokenizer(model, asked.chat), {"model": Path(model).name})
            save_prompts(file, found)
        found = load_prompts(file)
        _check_counts(found.prompts)
        lengths = sorted({prompt.length for prompt in found.prompts})
        sizes = [
            k
            for k in sorted(set(size or SIZES))
            if parse_budget(f"block_topk:{k}").decode_share(lengths[0]) < 1.0
        ]
        if not sizes:
            raise ValueError(f"size: expected one that leaves something out of {lengths[0]} tokens")
        lasts = list(dict.fromkeys((64, 0) if dense_last is None else dense_last))
        families = [[parse_budget(f"block_topk:{k},dense_last={n}") for k in sizes] for n in lasts]
        if calibrated:
            paths = _calibrate(model, sizes, out, lengths[0], file)
            families += [
                [parse_budget(f"block_topk:{k},dense_last={n},budgets={p}") for k, p in paths]
                for n in lasts
            ]
        trials = Trials(
            LocalModel(model, engine.arguments()),
            Workplace(found, file, out / "tune.jsonl", commit),
            loss,
        )
        best = cheapest(families, lambda budget: cost_of(budget, lengths), trials.holds)
    console.print(_table(trials, lengths, loss))
    if best is None:
        console.print(
            f"nothing holds a loss of {loss:g}; allow more, or narrow the interval with more "
            "prompts (--prompts-per-task)"
        )
        raise typer.Exit(1)
    console.print(f"cheapest that hold {loss:g}: {best.label}")
    config = best.config
    settings: dict[str, Any] = {"top_k": config.top_k, "dense_last": config.dense_last}
    if config.budgets is not None:
        settings["budgets"] = str(Path(best.label.partition("budgets=")[2]).resolve())
    console.print(f"--additional-config '{json.dumps({'sparsek': settings})}'", soft_wrap=True)


def _check_counts(prompts: Sequence[Prompt]) -> None:
    """Refuse single prompts: an interval of one has no width, and would always hold."""
    counts = Counter((one.task, one.variant, one.length) for one in prompts)
    fewest = min(counts.values(), default=0)
    if fewest < 2:
        raise ValueError(
            "prompts-per-task: expected at least 2 prompts of each task, variant and length, "
            f"got {fewest}"
        )


def _calibrate(
    model: str, sizes: list[int], out: Path, length: int, prompts: Path
) -> list[tuple[int, Path]]:
    """Files of budgets for each mean; curves are measured once."""
    levels = sorted({level for size in sizes for level in levels_of(size)})
    try:
        ids = read_prompts(model, tasks=TASKS_READ, length=length, count=1, seed=1 << 16, file=None)
    except ValueError:  # no tokenizer
        ids = read_prompts(model, tasks=TASKS_READ, length=length, count=1, seed=0, file=prompts)
    base = parse_budget(f"block_topk:{sizes[0]}")
    found = measure(model, ids, base, levels, tasks=list(TASKS_READ), length=length)
    return [(k, found.budgets(k, "head").save(out / f"budgets-{k}.json")) for k in sizes]


def _table(trials: Trials, lengths: list[int], loss: float) -> Table:
    table = Table(title=f"at {lengths[-1]} tokens", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("settings", overflow="fold")
    for name in ("prefill", "decode", "added NLL", "95 % interval", f"holds {loss:g}"):
        table.add_column(name, justify="right")
    for budget in sorted(trials.tried, key=lambda one: cost_of(one, lengths)):
        found = trials.losses[budget.label]
        table.add_row(
            budget.label,
            f"{budget.prefill_share(lengths[-1]):.1%}",
            f"{budget.decode_share(lengths[-1]):.1%}",
            f"{found.mean:+.4f}",
            f"{found.low:+.4f}..{found.high:+.4f}",
            "yes" if found.high <= loss else "no",
        )
    return table

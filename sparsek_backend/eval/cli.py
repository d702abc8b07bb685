"""`sparsek eval`: dense against sparse at several budgets, on a local or a served model."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparsek_backend.command_line import failing_on, grouped
from sparsek_backend.eval.budgets import (
    DEFAULT_BUDGETS,
    Budget,
    parse_budget,
    parse_budgets,
    pictured,
    with_mixed_phases,
)
from sparsek_backend.eval.mass import (
    measure_model,
    phase_summaries,
    plot_masses,
    write_masses,
)
from sparsek_backend.eval.options import (
    PROMPTS_ON_CPU,
    PROMPTS_ON_GPU,
    PromptOptions,
    check_unique,
    default_prompts_per_task,
    server_of,
)
from sparsek_backend.eval.plot import plot_accuracy
from sparsek_backend.eval.prompt import VARIANTS, Tokenizer, Variant
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.record import read_rows
from sparsek_backend.eval.results import (
    collect_runs,
    perplexity_rows,
    read_results,
    retrieval_rows,
    warnings_of,
    write_results,
)
from sparsek_backend.eval.runs import LocalModel, OnProgress, Workplace, run_server
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.tables import perplexity_table, retrieval_tables
from sparsek_backend.eval.tasks import TASKS, make_prompts
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.models import fetch_model
from sparsek_backend.patterns.prefill import PrefillPattern
from sparsek_backend.pyplot import import_pyplot

# Plain help: in panels, the widest option would leave no room for what the options mean.
app = typer.Typer(
    rich_markup_mode=None, add_completion=False, context_settings={"max_content_width": 100}
)
console = Console()
_mendable = partial(failing_on, ValueError, ImportError, RuntimeError, OSError)


@dataclass(frozen=True)
class QuestionArguments:
    """Options that say which questions are asked."""

    task: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(TASKS)}. Repeatable; by default all."),
    ] = None
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="plain: the question ends the prompt; followed: 600 tokens of notes come behind "
            "it. Repeatable; by default both."
        ),
    ] = None
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt. Repeatable; by default 4096.")
    ] = None
    prompts_per_task: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts of each task, variant and length; 0 skips them. By default "
            f"{PROMPTS_ON_GPU} with a GPU, {PROMPTS_ON_CPU} without.",
        ),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Prompts are a user's turn of the model's chat template, or not; by default "
            "where it has one.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0

    def checked(self, **texts: Any) -> PromptOptions:
        """The options with defaults filled in; without ``texts``, there is no perplexity.

        Raises:
            ValueError: an option names what does not exist, or names something twice.
        """
        for one in self.variant or ():
            if one not in VARIANTS:
                raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {one!r}")
        for option in ("task", "variant", "length"):
            check_unique(option, list(getattr(self, option) or ()))
        count = self.prompts_per_task
        return PromptOptions(
            tasks=tuple(self.task or TASKS),
            variants=tuple(cast(Variant, one) for one in self.variant or VARIANTS),
            lengths=tuple(self.length or (4096,)),
            prompts_per_task=default_prompts_per_task() if count is None else count,
            seed=self.seed,
            **texts,
        )


@dataclass(frozen=True)
class PromptArguments(QuestionArguments):
    """Options that say which questions are asked, and which texts are read."""

    texts: Annotated[int, typer.Option(min=0, help="Texts for perplexity; 0 skips it.")] = 4
    text_length: Annotated[int, typer.Option(min=128, help="Tokens of each text.")] = 4096
    texts_folder: Annotated[
        Path | None, typer.Option(help="Folder of .txt files; by default speeches are fetched.")
    ] = None

    def checked(self, **texts: Any) -> PromptOptions:
        """The options with defaults filled in."""
        return super().checked(
            texts=self.texts,
            text_length=self.text_length,
            texts_folder=self.texts_folder,
            **texts,
        )


@dataclass(frozen=True)
class EngineOptions:
    """Options of the local engine."""

    dtype: Annotated[
        str | None,
        typer.Option(
            help="dtype of the local engine; by default the model's own, or float32 on a CPU that "
            "has no instructions for bf16."
        ),
    ] = None
    gpu_memory: Annotated[
        float | None, typer.Option(help="gpu_memory_utilization of the local engine.")
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="Size of the local engine's KV cache, on a GPU that others use too."),
    ] = None
    eager: Annotated[
        bool, typer.Option("--eager", help="enforce_eager: no compilation, no graphs.")
    ] = False

    def arguments(self) -> dict[str, object]:
        """Arguments of `vllm.LLM`."""
        found: dict[str, object] = {}
        if self.dtype is not None:
            found["dtype"] = self.dtype
        if self.gpu_memory is not None:
            found["gpu_memory_utilization"] = self.gpu_memory
        if self.kv_cache_gib is not None:
            found["kv_cache_memory_bytes"] = int(self.kv_cache_gib * 2**30)
        if self.eager:
            found["enforce_eager"] = True
        return found


@dataclass(frozen=True)
class BudgetOptions:
    """Options that say which budgets are compared with dense attention."""

    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="block_topk:16, sink_window, sink_window:1024, window (no sinks), with settings: "
            "block_topk:16,query_tile=1. Repeatable; dense always runs."
        ),
    ] = None
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed", help="Add each block_topk budget sparse in the prefill or decode alone."
        ),
    ] = False
    picture: Annotated[
        bool,
        typer.Option(
            "--picture",
            help="The budgets of one picture: block_topk of four sizes, and sinks and window of as "
            "many tokens; --budget adds to them.",
        ),
    ] = False

    def parsed(self) -> list[Budget]:
        """Dense first, then the others in order, each once.

        Raises:
            ValueError: a budget that cannot be read; the message says what was expected.
        """
        chosen = pictured() if self.picture else [] if self.budget else list(DEFAULT_BUDGETS)
        chosen += self.budget or []
        return parse_budgets(with_mixed_phases(chosen) if self.mixed else chosen)


_LOCAL_ONLY = (
    "model",
    "chat",
    *(f.name for kind in (BudgetOptions, EngineOptions) for f in fields(kind)),
)
_OF_PROMPTS = tuple(f.name for f in fields(PromptArguments))

Commit = Annotated[str, typer.Option(help="Commit to record where there is no git.")]


@app.callback(invoke_without_command=True)
@grouped
def evaluate(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or name; by default SmolLM2-135M-Instruct is prepared."),
    ] = None,
    budgets: BudgetOptions,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Score running servers instead: [LABEL=]http://host:port/v1. Repeatable; the "
            "first is the reference."
        ),
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="Model name at the servers.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts that `sparsek eval prompts` made, in place of new ones."),
    ] = None,
    asked: PromptArguments,
    engine: EngineOptions,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("eval-results"),
    name: Annotated[str, typer.Option(help="Stem of the result files.")] = "quality",
    commit: Commit = "",
) -> None:
    """Retrieval and perplexity, dense against sparse, prompt by prompt.

    Writes tables as CSV, everything as JSON, a plot, and each score as it is found: the same
    command continues an interrupted evaluation.
    """
    if context.invoked_subcommand is not None:
        return
    with _mendable():
        given = {name for name in context.params if _is_given(context, name)}
        if base_url:
            _refuse(given, _LOCAL_ONLY, "base-url: a server has its own model, budget and engine")
            check_unique("base-url", [server_of(text)[0] for text in base_url])
        elif served_model:
            raise ValueError("served-model: expected with --base-url only; use --model")
        if prompts is not None:
            _refuse(given, _OF_PROMPTS, "prompts: the file has the prompts and texts")
        compared = budgets.parsed()
        options = asked.checked()
        import_pyplot()  # what the end needs is missed at the start
        out.mkdir(parents=True, exist_ok=True)
        prompts_file = prompts or out / f"{name}.prompts.json.gz"
        what = "" if base_url else model or str(fetch_model())
        if prompts is not None:
            found = load_prompts(prompts)
        else:
            if base_url:
                url = server_of(base_url[0])[1]
                found = _make(options, ServedScorer(url, served_model), url)
            else:
                found = _make(options, HubTokenizer(what, asked.chat), what)
            save_prompts(prompts_file, found)
        place = Workplace(found, prompts_file, out / f"{name}.jsonl", commit)
        runs: list[tuple[str, Callable[[OnProgress], str]]] = []
        if base_url:
            for url in base_url:
                runs.append((server_of(url)[0], partial(run_server, url, served_model, place)))
        else:
            local = LocalModel(what, engine.arguments())
            runs += [(one.label, partial(local.run, one, place)) for one in compared]
        _report(out, name, _run_all(found, runs), commit)


@app.command("prompts")
@grouped
def make_prompt_file(
    model: Annotated[str, typer.Argument(help="Model folder or name, with its tokenizer.")],
    asked: PromptArguments,
    out: Annotated[Path, typer.Option(help="File to write; .gz compresses it.")] = Path(
        "prompts.json.gz"
    ),
) -> None:
    """Prepare prompts as token ids, for a machine that has the model without its tokenizer."""
    with _mendable():
        found = _make(asked.checked(), HubTokenizer(model, asked.chat), model)
        save_prompts(out, found)
    console.print(f"wrote {len(found.prompts)} prompts and {len(found.texts)} texts to {out}")


@app.command("report")
def report(
    record: Annotated[Path, typer.Argument(help="The .jsonl file of an evaluation.")],
    commit: Commit = "",
) -> None:
    """Write tables, JSON and plot again from a record, also of an unfinished evaluation."""
    with _mendable():
        if record.suffix != ".jsonl" or not record.is_file():
            reason = "which is no such file" if record.exists() else "which does not exist"
            raise ValueError(f"record: expected a .jsonl file, got {str(record)!r}, {reason}")
        _report(record.parent, record.stem, None, commit)


@app.command("picture")
def draw_picture(
    results: Annotated[list[Path], typer.Argument(help="Result JSONs, of one model.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("picture.png"),
) -> None:
    """Draw accuracy over attended share from result files: a panel for each length and variant.

    A budget that several files have is drawn from the last of them.
    """
    with _mendable():
        model, rows = read_results(results)
        out.parent.mkdir(parents=True, exist_ok=True)
        console.print(f"wrote {plot_accuracy(rows, out, model)}")


@app.command("mass")
def measure_mass(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    budget: Annotated[
        str, typer.Option(help="One budget of block_topk or pattern.")
    ] = "block_topk:32",
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt file, for a model without a tokenizer.")
    ] = None,
    task: Annotated[str, typer.Option(help="Task of the prompt.")] = "multi_key",
    length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    seed: Annotated[int, typer.Option(help="Of the prompt.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("eval-results"),
    name: Annotated[str, typer.Option(help="Stem of the result files.")] = "mass",
) -> None:
    """Share of the exact attention that a selection catches, by layer and KV head: CSV and plot.

    The model reads one prompt through Transformers, on a GPU if there is one.
    """
    with _mendable():
        parsed = parse_budget(budget)
        policy_of, pattern = parsed.policy, parsed.config.pattern
        if not policy_of(0).selects_blocks:
            raise ValueError(f"budget: expected one that selects blocks, got {budget!r}")
        import_pyplot()
        if prompts is None:
            tokenizer = HubTokenizer(model)
            made = make_prompts(
                tokenizer, tasks=[task], variants=["plain"], lengths=[length], count=1, seed=seed
            )
        else:
            known = load_prompts(prompts).prompts
            made = (p for p in known if (p.task, p.length) == (task, length))
        prompt = next(iter(made), None)
        if prompt is None:
            raise ValueError(f"prompts: expected one of task {task!r} with {length} tokens")
        with console.status("reading the prompt") as status:
            masses = measure_model(
                model,
                prompt.ids,
                policy_of,
                entries=None if pattern is None else PrefillPattern.load(pattern).entries,
                on_layer=lambda layer: status.update(f"layer {layer}"),
            )
        title = f"{Path(model).name}, {budget}, {length} tokens, {task}"
        for line in phase_summaries(masses):
            console.print(line)
        console.print(f"wrote {write_masses(out / f'{name}.csv', masses)}")
        console.print(f"wrote {plot_masses(out / f'{name}.png', masses, title)}")


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _refuse(given: set[str], options: Sequence[str], reason: str) -> None:
    """Refuse options that would be ignored."""
    ignored = [f"--{name.replace('_', '-')}" for name in options if name in given]
    if ignored:
        raise ValueError(f"{reason}; drop {', '.join(ignored)}")


def _make(options: PromptOptions, tokenizer: Tokenizer, model: str) -> PromptSet:
    details = {"model": Path(model).name, "chat": getattr(tokenizer, "chat", False)}
    with console.status("making the prompts"):
        return options.make(tokenizer, details)


def _run_all(
    asked: PromptSet, runs: Sequence[tuple[str, Callable[[OnProgress], str]]]
) -> list[str]:
    """Run everything under one progress bar; returns the runs' keys."""
    steps = len(asked.prompts) + len(asked.texts)
    keys = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(runs) * steps)
        for label, run in runs:
            begin = time.monotonic()

            def tell(count: int, what: str, label: str = label) -> None:
                progress.update(bar, advance=count, description=f"{label}: {what}")

            tell(0, "starting")
            keys.append(run(tell))
            progress.console.print(f"{label}: done, {time.monotonic() - begin:.0f} s")
    return keys


def _report(out: Path, name: str, keys: Sequence[str] | None, commit: str) -> None:
    runs = collect_runs(read_rows(out / f"{name}.jsonl"), keys)
    retrieval, perplexity = retrieval_rows(runs), perplexity_rows(runs)
    for table in retrieval_tables(retrieval):
        console.print(table)
    if perplexity:
        console.print(perplexity_table(perplexity))
    for warning in warnings_of([*retrieval, *perplexity]):
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", highlight=False)
    model = runs[0].about["model"]
    details = {
        "model": model,
        "date": datetime.date.today().isoformat(),
        "machine": runs[0].about["machine"],
        "reported_by": asdict(describe_machine(choose_device(), commit)),
    }
    written = write_results(out, name, runs, details)
    if retrieval:
        written.append(plot_accuracy(retrieval, out / f"{name}.png", model))
    for path in written:
        console.print(f"wrote {path}")

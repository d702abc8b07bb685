"""Groups of command-line options: prompts and texts, budgets, engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import torch
import typer

from sparsek_backend.command_line import refuse_set
from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.perplexity import pick_texts, read_texts
from sparsek_backend.eval.prompt import VARIANTS, Tokenizer, Tokens, Variant
from sparsek_backend.eval.prompt_file import PromptSet
from sparsek_backend.eval.ruler import make_ruler_prompts, read_tasks
from sparsek_backend.eval.tasks import TASKS, check_tasks, make_prompts
from sparsek_backend.models import fetch_texts

DEFAULT_BUDGETS = ("block_topk:32", "block_topk:16", "block_topk:8", "sink_window")
_PICTURED = (8, 16, 32, 64)
_ON_GPU, _ON_CPU = 100, 2
"""Prompts enough for differences of a few points; few enough for an hour."""


@dataclass(frozen=True)
class QuestionOptions:
    """Which questions are asked."""

    suite: Annotated[
        str | None,
        typer.Option(
            help="ruler: the thirteen tasks of RULER, by its authors' package, in place of ours."
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(TASKS)}. With a suite, one of its. Repeatable; by default all."
        ),
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
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts of each task, variant and length; 0 skips them. By default "
            f"{_ON_GPU} with a GPU, {_ON_CPU} without.",
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

    def check(self, given: Path | None = None) -> None:
        """Raise a ValueError for options that name what does not exist, or something twice.

        Beside a ``given`` file of prompts no option may be set.
        """
        if given is not None:
            refuse_set("prompts: the file has the prompts and texts", self)
        if self.suite not in (None, "ruler"):
            raise ValueError(f"suite: expected ruler, got {self.suite!r}")
        check_tasks(self.task or (), read_tasks() if self.suite else TASKS)
        if self.suite:
            refuse_set("suite: RULER's questions end their prompts", variant=self.variant)
        for one in self.variant or ():
            if one not in VARIANTS:
                raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {one!r}")
        for option in ("task", "variant", "length"):
            check_unique(option, getattr(self, option) or ())

    def make(
        self,
        tokenizer: Tokenizer,
        model: str,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> PromptSet:
        """Make the prompts, and take the texts."""
        count = self.samples
        if count is None:
            count = _ON_GPU if torch.cuda.is_available() else _ON_CPU
        lengths = self.length or [4096]
        prompts = (
            make_ruler_prompts(
                tokenizer,
                model,
                tasks=self.task or list(read_tasks()),
                lengths=lengths,
                count=count,
                seed=self.seed,
                on_progress=on_progress,
            )
            if self.suite
            else make_prompts(
                tokenizer,
                tasks=self.task or list(TASKS),
                variants=cast(Sequence[Variant], self.variant or VARIANTS),
                lengths=lengths,
                count=count,
                seed=self.seed,
            )
        )
        chat = getattr(tokenizer, "chat", False)
        details = {"suite": self.suite, "seed": self.seed, "model": Path(model).name, "chat": chat}
        return PromptSet(list(prompts), self.take_texts(tokenizer), details)

    def take_texts(self, tokenizer: Tokenizer) -> list[tuple[str, Tokens]]:
        """Names and tokens of the texts for perplexity; here there are none."""
        return []


@dataclass(frozen=True)
class PromptOptions(QuestionOptions):
    """Which questions are asked, and which texts are read."""

    texts: Annotated[
        int | None,
        typer.Option(
            min=0, help="Texts for perplexity; 0 skips it. By default 4, and 0 with a suite."
        ),
    ] = None
    text_length: Annotated[int, typer.Option(min=128, help="Tokens of each text.")] = 4096
    texts_folder: Annotated[
        Path | None, typer.Option(help="Folder of .txt files; by default speeches are fetched.")
    ] = None

    def check(self, given: Path | None = None) -> None:
        """Raise a ValueError also where nothing is to be measured, or a folder has no texts."""
        super().check(given)
        if self.samples == 0 and not self._texts:
            raise ValueError("nothing to measure: --samples 0 and --texts 0")
        if self._texts and self.texts_folder is not None:
            read_texts(self.texts_folder)

    def take_texts(self, tokenizer: Tokenizer) -> list[tuple[str, Tokens]]:
        """Names and tokens of the texts for perplexity."""
        if not self._texts:
            return []
        found = read_texts(self.texts_folder or fetch_texts())
        return pick_texts(found, tokenizer, length=self.text_length, count=self._texts)

    @property
    def _texts(self) -> int:
        default = 0 if self.suite else 4
        return default if self.texts is None else self.texts


@dataclass(frozen=True)
class BudgetOptions:
    """Which budgets are compared with dense attention."""

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
        """Dense first, then the others in order.

        Raises:
            ValueError: a budget that cannot be read, one that is given twice, or none but dense.
        """
        texts = pictured() if self.picture else [] if self.budget else list(DEFAULT_BUDGETS)
        budgets = [parse_budget(text) for text in texts + (self.budget or [])]
        if self.mixed:
            budgets = [one for budget in budgets for one in (budget, *halves(budget))]
        sparse = [budget for budget in budgets if budget.settings is not None]
        budgets = [parse_budget("dense"), *sparse]
        check_unique("budget", [budget.label for budget in budgets])
        if len(budgets) == 1:
            raise ValueError("budget: expected at least one besides dense")
        return budgets


def halves(budget: Budget) -> list[Budget]:
    """A ``block_topk`` budget sparse in the prefill alone and in the decode alone."""
    settings = budget.settings or {}
    if settings.get("mode") != "block_topk" or "sparse_phase" in settings:
        return []
    return [parse_budget(f"{budget.label},sparse_phase={x}") for x in ("prefill", "decode")]


def pictured() -> list[str]:
    """The budgets of one picture: block selection, and sinks and window of as many tokens."""
    blocks = [f"block_topk:{k},decode_tokens={64 * k}" for k in _PICTURED]
    policies = [parse_budget(text).policy().prefill for text in blocks]
    windows = [(p.budget_blocks - p.sink_blocks) * p.sel_block_size for p in policies]
    return blocks + [f"sink_window:{n},num_sink={policies[0].num_sink}" for n in windows]


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engines that are started here."""

    dtype: Annotated[
        str | None,
        typer.Option(
            help="dtype of the engine; by default the model's own. `eval` and `tune` take float32 "
            "on a CPU that has no instructions for bf16."
        ),
    ] = None
    batched_tokens: Annotated[
        int | None, typer.Option(help="max_num_batched_tokens of the engine.")
    ] = None
    gpu_memory: Annotated[
        float | None, typer.Option(help="gpu_memory_utilization of the engine.")
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="Size of the engine's KV cache, on a GPU that others use too."),
    ] = None
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="GPUs per engine; one if left out.")
    ] = None
    eager: Annotated[
        bool, typer.Option("--eager", help="enforce_eager: no compilation, no graphs.")
    ] = False

    def arguments(self) -> dict[str, object]:
        """Arguments of `vllm.LLM`, of the options that are set."""
        found = {
            "dtype": self.dtype,
            "max_num_batched_tokens": self.batched_tokens,
            "gpu_memory_utilization": self.gpu_memory,
            "kv_cache_memory_bytes": self.kv_cache_gib and int(self.kv_cache_gib * 2**30),
            "tensor_parallel_size": self.tensor_parallel,
            "enforce_eager": self.eager or None,
        }
        return {name: value for name, value in found.items() if value is not None}


def server_of(text: str) -> tuple[str, str]:
    """Label and URL of a server written as ``[LABEL=]URL``."""
    label, separator, url = text.partition("=")
    return (label, url) if separator and "/" not in label else (text, text)


def check_unique(name: str, values: Sequence[object]) -> None:
    """Refuse a value that is given twice."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{name}: {value!r} is given twice")

"""Groups of command-line options: prompts and texts, budgets, engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sparsek_backend.command_line import check_each, refuse_set, token_option
from sparsek_backend.eval.budgets import Budget, parse_budget
from sparsek_backend.eval.prompt import VARIANTS, Prompt, Tokenizer
from sparsek_backend.eval.prompt_file import PromptSet
from sparsek_backend.eval.ruler import make_ruler_prompts, read_tasks
from sparsek_backend.eval.tasks import TASKS, make_prompts, read_texts
from sparsek_backend.models import fetch_texts

_ON_GPU: dict[str, Any] = {"arms": "block_topk:144", "length": 16384, "samples": 100}
_ON_CPU: dict[str, Any] = {"arms": "block_topk:16,decode_tokens=512", "length": 4096, "samples": 2}
"""Prompts enough for differences of a few points; few enough for an hour."""
_HERE = _ON_GPU if torch.cuda.is_available() else _ON_CPU


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are given."""

    suite: Annotated[
        str | None,
        typer.Option(
            help="ruler: RULER's thirteen tasks (by its authors' package, extra `ruler`) in place "
            "of ours."
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(TASKS)}, or a task of the suite, such as niah_single_1. "
            "Repeatable; by default all."
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
        list[int] | None,
        token_option(
            f"Tokens of a prompt, such as 16k. Repeatable; by default {_ON_GPU['length']} with a "
            f"GPU, {_ON_CPU['length']} without."
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts of each task, variant and length. By default "
            f"{_ON_GPU['samples']} with a GPU, {_ON_CPU['samples']} without.",
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
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0
    texts_folder: Annotated[
        Path | None,
        typer.Option(help="Folder of .txt files of the task text; by default speeches."),
    ] = None

    def check(self, given: Path | None = None) -> None:
        """Raise a ValueError for options that name what does not exist, or something twice.

        Beside a ``given`` file of prompts no option may be set.
        """
        if given is not None:
            refuse_set("prompts: the file has the prompts", self)
        check_each("suite", self.suite and [self.suite], ["ruler"])
        check_each("task", self.task, read_tasks() if self.suite else TASKS)
        check_each("variant", self.variant, VARIANTS)
        check_each("length", self.length)
        if self.suite:
            reason = "suite: RULER's questions end their prompts, and it has texts of its own"
            refuse_set(reason, variant=self.variant, texts_folder=self.texts_folder)

    def make(
        self,
        tokenizer: Tokenizer,
        model: str,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> PromptSet:
        asked: dict[str, Any] = {"seed": self.seed, "count": self.samples or _HERE["samples"]}
        asked["lengths"] = self.length or [_HERE["length"]]
        if self.suite:
            asked |= {"tasks": self.task or list(read_tasks()), "on_progress": on_progress}
            prompts: Iterable[Prompt] = make_ruler_prompts(tokenizer, model, **asked)
        else:
            tasks = self.task or TASKS
            texts = read_texts(self.texts_folder or fetch_texts()) if "text" in tasks else ()
            asked |= {"tasks": tasks, "variants": self.variant or VARIANTS, "texts": texts}
            prompts = make_prompts(tokenizer, **asked)
        chat = getattr(tokenizer, "chat", False)
        details = {"suite": self.suite, "seed": self.seed, "model": Path(model).name, "chat": chat}
        return PromptSet(list(prompts), details)


@dataclass(frozen=True)
class BudgetOptions:
    """Which budgets are compared with dense attention."""

    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="What is attended: block_topk:16, sink_window:1024, window (no sinks) or "
            "pattern:16,pattern=FILE; settings behind commas: block_topk:16,decode_tokens=512. "
            "Repeatable; dense always runs."
        ),
    ] = None
    arms: Annotated[
        str | None,
        typer.Option(
            help="A block_topk budget to compare with half and twice of it, and with sinks and a "
            f"window of as many tokens. If neither --arms nor --budget is given: {_ON_GPU['arms']} "
            f"with a GPU, {_ON_CPU['arms']} without one."
        ),
    ] = None
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed", help="Add each block_topk budget with prompts or decoded tokens dense."
        ),
    ] = False

    def parsed(self) -> list[Budget]:
        """Dense first, then the others in order.

        Raises:
            ValueError: a budget that cannot be read, one that is given twice, or none but dense.
        """
        arms = self.arms or (None if self.budget else _HERE["arms"])
        budgets = [parse_budget("dense")]
        for text in (*(arms_of(arms) if arms else ()), *(self.budget or ())):
            budget = parse_budget(text)
            budgets += [] if budget.settings is None else [budget]
            whole = (budget.config.mode, budget.config.sparse_phase) == ("block_topk", "both")
            for phase in ("prefill", "decode") if self.mixed and whole else ():
                budgets.append(parse_budget(f"{budget.label},sparse_phase={phase}"))
        check_each("budget", [budget.label for budget in budgets])
        if len(budgets) == 1:
            raise ValueError("budget: expected at least one besides dense")
        return budgets


def arms_of(text: str) -> list[str]:
    """A budget, half and twice of what it selects, and a window of as many tokens with its sinks.

    Raises:
        ValueError: no ``block_topk`` budget, or one of which there is no half.
    """
    budget = parse_budget(text)
    if budget.config.mode != "block_topk":
        raise ValueError(f"arms: expected a block_topk budget, got {text!r}")
    blocks, pairs = budget.config.top_k, budget.config.decode_tokens // 2
    if min(blocks, pairs) < 2:
        raise ValueError(f"arms: expected 2 blocks and 4 decode_tokens at least, got {text!r}")
    sized = ("top_k=", "decode_tokens=")
    rest = "".join(f",{x}" for x in text.split(",")[1:] if not x.startswith(sized))
    sizes = ((blocks // 2, pairs // 2), (2 * blocks, 2 * pairs))
    half, twice = (f"block_topk:{x},decode_tokens={2 * y}{rest}" for x, y in sizes)
    policy = budget.policy().prefill
    window = (policy.budget_blocks - policy.sink_blocks) * policy.sel_block_size
    return [text, half, twice, f"sink_window:{window},num_sink={policy.num_sink}"]


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
        int | None,
        typer.Option(help="Tokens that a step takes at most (vLLM's max_num_batched_tokens)."),
    ] = None
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="Share of the GPU's memory (vLLM's gpu_memory_utilization)."),
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(min=0.0, help="Size of the engine's KV cache, on a GPU that others use too."),
    ] = None
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="GPUs per engine; one if left out.")
    ] = None
    eager: Annotated[
        bool,
        typer.Option(
            "--eager", help="No compilation and no graphs; on a CPU compiling takes minutes."
        ),
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

    def gpus(self) -> list[str | None]:
        """The GPUs of each engine that runs beside the others, as ``CUDA_VISIBLE_DEVICES``.

        ``None`` leaves one engine to find its own.
        """
        seen = map(str, range(torch.cuda.device_count()))
        every = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(seen)
        found, size = every.split(","), self.tensor_parallel or 1
        if every and len(found) < size:
            raise ValueError(f"tensor-parallel: expected at most {len(found)} GPUs, got {size}")
        ends = range(size, len(found) + 1, size)
        return [",".join(found[end - size : end]) for end in ends] if every else [None]


def servers_of(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Labels, which differ, and URLs of servers written as ``[LABEL=]URL``."""
    servers = []
    for text in texts:
        label, separator, url = text.partition("=")
        servers.append((label, url) if separator and "/" not in label else (text, text))
    check_each("base-url", [label for label, _ in servers])
    return servers

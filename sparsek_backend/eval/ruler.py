"""RULER (arXiv 2404.06654): prompts of its thirteen tasks, by its authors' own generators.

Their package has generators, texts, templates and metric; nothing of it is here.  A generator is a
script that runs for ever where nothing fits, so each task and length is a worker of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from sparsek_backend.eval.prompt import Prompt, Tokenizer, Tokens, make_answer
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts, save_prompts
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.eval.workers import report_progress, run_worker, serve_job
from sparsek_backend.extras import needing

_SEED = 42
"""RULER's own, which seed 0 stands for."""
_TURN = " \u2063"
"""Marks the end of the user's words in a template, a word of its own."""
_STEP = 64
"""Tokens by which a generator is asked for less, where prompt and answer overrun a length."""
_SILENCE = 120.0
"""Seconds without a prompt that fits, after which a generator is ended."""
_MOST_WORKERS = 8  # some take a gigabyte


class _TooShortError(Exception):
    """The generator's smallest prompt overruns; it would try for ever."""


def read_tasks() -> dict[str, dict[str, Any]]:
    """RULER's tasks by name: generator, its arguments, template, tokens to generate, metric.

    Raises:
        ImportError: RULER's package is not installed; the message has the install command.
    """
    with needing("RULER is in a package of its authors", extra="ruler"):
        import yaml
        from long_context_eval.data.synthetic.constants import TASKS as PROMPTS
        from long_context_eval.eval.synthetic.constants import TASKS as METRICS
    tasks = yaml.safe_load(files("long_context_eval").joinpath("synthetic.yaml").read_text())
    for task in tasks.values():
        metric = METRICS[task["task"]]["metric_fn"].__name__
        task |= {**PROMPTS[task["task"]], "metric": metric}
    return dict(tasks)


def make_ruler_prompts(
    tokenizer: Tokenizer,
    model: str,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    count: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> list[Prompt]:
    """Return ``count`` prompts of every task and length: each fits its length with its answer.

    Args:
        model: what ``tokenizer`` was opened with: a folder, a name, or a server's address.

    Raises:
        ValueError: a length that a task does not fit.
        WorkerError: a generator failed, or tried for ever; the message begins with the length.
    """
    served = isinstance(tokenizer, ServedScorer)
    opened = [model, getattr(tokenizer, "model" if served else "chat")]
    jobs = list(product(lengths, tasks))

    def make(length: int, task: str) -> Sequence[Prompt]:
        file = Path(folder, f"{task}-{length}.json")
        job = {"task": task, "length": length, "count": count, "seed": _SEED + seed}
        result = run_worker(
            "sparsek_backend.eval.ruler",
            {**job, "served": served, "tokenizer": opened, "file": str(file)},
            label=f"length {length}: RULER's {task}",
            timeout=_SILENCE,
        )
        if least := result.get("least"):
            raise ValueError(
                f"length: expected at least {least} tokens for task {task!r}, got {length}"
            )
        return load_prompts(file).prompts

    found: list[Prompt] = []
    workers = min(len(jobs), os.cpu_count() or 1, _MOST_WORKERS)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number, prompts in enumerate(pool.map(make, *zip(*jobs, strict=True)), 1):
            found += prompts
            on_progress(f"made {number} of {len(jobs)} kinds of prompts")
    return found


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Make the prompts of one task and length, and write them to a prompt file."""
    tokenizer = (ServedScorer if job["served"] else HubTokenizer)(*job["tokenizer"])
    before, after = tokenizer.frame()
    chat = getattr(tokenizer, "chat", False)
    task, length = read_tasks()[job["task"]], job["length"]
    answer_tokens = task["tokens_to_generate"]
    counted = 0

    def pieces(text: str) -> tuple[Tokens, ...]:
        if not chat:
            return before, tokenizer.read(text)
        words, _, lead = text.rpartition(_TURN)
        return before, tokenizer.read(words.replace(_TURN, "")), after, tokenizer.read(lead)

    def text_to_tokens(text: str) -> list[int]:
        nonlocal counted
        counted += 1
        tokens = list(chain.from_iterable(pieces(text)))
        if counted == 1 and len(tokens) + answer_tokens > length:
            raise _TooShortError(len(tokens) + answer_tokens)
        if len(tokens) + answer_tokens <= length:
            report_progress("one fits")
        return tokens

    _prepare_generators(text_to_tokens)
    template = task["template"] + (_TURN if chat else "") + task["answer_prefix"]
    found: dict[int, Prompt] = {}
    limit = length
    try:
        # RULER counts no answer in some tasks: what overruns is made again, a little shorter
        while len(found) < job["count"]:
            options = {"template": template, "max_seq_length": limit, "random_seed": job["seed"]}
            for row in _generate(task, num_samples=job["count"], **options):
                text, outputs = row["input"], row["outputs"]
                target = ("" if text[-1].isspace() else " ") + _target(task, outputs)
                prompt = Prompt(
                    task=job["task"],
                    variant="plain",
                    length=length,
                    index=row["index"],
                    pieces=tuple(piece for piece in pieces(text) if piece),
                    answers=tuple(make_answer(tokenizer, output) for output in outputs),
                    target=tokenizer.encode(target)[:answer_tokens],
                    max_tokens=answer_tokens,
                    metric=task["metric"],
                )
                if prompt.fits:
                    found.setdefault(prompt.index, prompt)
            limit -= _STEP
    except _TooShortError as error:
        return {"least": error.args[0]}
    save_prompts(Path(job["file"]), PromptSet([found[index] for index in sorted(found)]))
    return {}


def _prepare_generators(text_to_tokens: Callable[[str], list[int]]) -> None:
    """Let the generators count by a model's own tokenizer, and find sentences offline."""
    with needing("RULER splits texts into sentences", extra="ruler"):
        import nltk.tokenize
        import punkt
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
    from long_context_eval.data import tokenizer as counting
    from long_context_eval.data.synthetic import constants

    counting.select_tokenizer = lambda *_: SimpleNamespace(text_to_tokens=text_to_tokens)
    # the names by which some of them, as scripts of a folder, import these
    sys.modules |= {"tokenizer": counting, "constants": constants}
    model, parameters = punkt.load_model("english"), PunktParameters()
    for name in ("abbrev_types", "collocations", "sent_starters"):
        setattr(parameters, name, getattr(model, name))
    parameters.ortho_context.update(model.ortho_context)
    nltk.tokenize.sent_tokenize = PunktSentenceTokenizer(parameters).tokenize


def _generate(task: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Run a task's generator, and read what it wrote."""
    with TemporaryDirectory() as folder:
        options |= {"save_dir": folder, "save_name": "made", "tokenizer_path": "", **task["args"]}
        options["tokens_to_generate"] = task["tokens_to_generate"]
        sys.argv = [task["task"], *(f"--{name}={value}" for name, value in options.items())]
        # what it prints would pass for progress, where nothing fits
        quiet = {"print": lambda *_: None}
        generator = f"long_context_eval.data.synthetic.{task['task']}"
        runpy.run_module(generator, quiet, "__main__")
        lines = Path(folder, "made", "validation.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def _target(task: Mapping[str, Any], outputs: Sequence[str]) -> str:
    """The right answer, as RULER's examples of some tasks write it, elsewhere with commas."""
    if task["metric"] == "string_match_part":
        return outputs[0]
    if task["task"] == "common_words_extraction":
        return " ".join(f"{number}. {word}" for number, word in enumerate(outputs, 1))
    return (" " if task["task"] == "variable_tracking" else ", ").join(outputs)


if __name__ == "__main__":
    serve_job(work)

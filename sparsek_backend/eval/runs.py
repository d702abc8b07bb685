"""Runs of an evaluation: one for each local budget or server, continued from the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from sparsek_backend import __version__
from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.engine import backend_report, close_engine
from sparsek_backend.eval.prompt import Prompt, Tokens
from sparsek_backend.eval.prompt_file import PromptSet, load_prompts
from sparsek_backend.eval.record import append_rows, pending, prompt_row, run_key
from sparsek_backend.eval.scoring import Reply, metric_of, score_reply
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.eval.workers import report_progress, run_worker, serve_job
from sparsek_backend.machine import choose_device, cpu_dtype, describe_machine

_BATCH_ON_GPU, _BATCH_ON_CPU = 128, 4
_SERVER_BATCH = 32
_TOKENS_AT_ONCE = 1 << 21
"""Tokens of the prompts in one call, at most: an interruption loses its scores, a minute's work."""
_LONGEST_REPLY = 600
_ENGINE_ON_GPU = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.8,  # log-probabilities of a prompt take some gigabytes beside
}
_ENGINE_ON_CPU = {"max_num_seqs": 8, "max_num_batched_tokens": 2048}

Replying = Callable[[Sequence[Prompt]], Sequence[Reply]]
"""A model: greedy replies to prompts, and what is likely along their targets."""
OnProgress = Callable[[int, str], None]
"""Gets how many prompts were scored, and what they were."""


@dataclass(frozen=True)
class Workplace:
    """Where a run finds its prompts and leaves its scores."""

    prompts: PromptSet  # what is asked; ``prompts_file`` is the same on disk
    prompts_file: Path
    record: Path  # the JSON lines
    commit: str = ""  # to record where there is no git

    def score(self, reply: Replying, run: str, batch: int, on_progress: OnProgress) -> None:
        """Score what the record lacks of a run, a call of the model at a time.

        Args:
            batch: prompts in one call at most, which are of one length; fewer where they are long.
                Texts, of which every token has its likeliest ones, come one by one.
        """
        missing = pending(self.prompts.prompts, self.record, run)
        kinds = groupby(missing, key=lambda p: (p.length, p.variant == "text"))
        for (length, text), group in kinds:
            alike = list(group)
            size = 1 if text else max(1, min(batch, _TOKENS_AT_ONCE // length))
            for asked in (alike[i : i + size] for i in range(0, len(alike), size)):
                rows = []
                for prompt, got in zip(asked, reply(asked), strict=True):
                    said: Any = got.tokens if got.text is None else got.text[:_LONGEST_REPLY]
                    scores = score_reply(prompt, got) | {"reply": said}
                    rows.append({"run": run, **prompt_row(prompt), **scores})
                append_rows(self.record, rows)
                on_progress(len(asked), f"{asked[-1].task}, {length} tokens")

    def check_metrics(self) -> None:
        """Raise an ImportError now where scoring texts would need a package that is missing."""
        for prompt in self.prompts.prompts:
            if prompt.metric:
                metric_of(prompt)

    def missing(self, run: str, on_progress: OnProgress) -> int:
        """How many prompts the record lacks of a run; progress is told of the others."""
        total = len(self.prompts.prompts)
        missing = len(pending(self.prompts.prompts, self.record, run))
        on_progress(total - missing, f"{total - missing} of {total} are in the record")
        return missing


@dataclass(frozen=True)
class LocalModel:
    """A model in an engine of our own."""

    model: str  # folder or name
    engine: Mapping[str, Any] = field(default_factory=dict)  # arguments of `vllm.LLM`

    @property
    def name(self) -> str:
        """Its name in results."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model

    def arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`, with our defaults."""
        on_cpu = {**_ENGINE_ON_CPU, "dtype": cpu_dtype()}
        return {**(_ENGINE_ON_GPU if torch.cuda.is_available() else on_cpu), **self.engine}

    def key(self, budget: Budget, commit: str) -> str:
        parts = asdict(describe_machine(choose_device(), commit))
        files = sorted(Path(self.model).glob("*.*"))
        said = {x: x.read_text() if x.name == "config.json" else x.stat().st_size for x in files}
        parts |= {"model": self.name, "files": [(x.name, what) for x, what in said.items()]}
        parts |= {"settings": budget.settings, "engine": self.arguments(), "sparsek": __version__}
        return run_key(parts)

    def run(
        self, budget: Budget, place: Workplace, on_progress: OnProgress, gpus: str | None = None
    ) -> str:
        """Score what the record lacks, in a process of its own; returns the run's key.

        Args:
            gpus: ``CUDA_VISIBLE_DEVICES`` of the process; ``None`` leaves it as it is.

        Raises:
            WorkerError: the engine failed; the message begins with the budget.
        """
        key = self.key(budget, place.commit)
        if not place.missing(key, on_progress):
            return key
        data = {
            "model": self.model,
            "engine": self.arguments(),
            "prompts": str(place.prompts_file),
            "record": str(place.record),
            "run": _run_row(key, place, budget.label, self.name, settings=budget.settings),
        }

        def tell(message: str) -> None:
            count, _, what = message.partition(" ")
            on_progress(int(count), what)

        run_worker(
            "sparsek_backend.eval.runs",
            data,
            label=f"budget {budget.label!r}",
            on_progress=tell,
            environment={} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus},
        )
        return key


def work(data: Mapping[str, Any]) -> None:
    """In the worker: open the engine of one budget and score what its record lacks."""
    from sparsek_backend.eval.local import LocalScorer, open_scoring_engine

    row, record = data["run"], Path(data["record"])
    place = Workplace(load_prompts(Path(data["prompts"])), Path(data["prompts"]), record)
    longest = place.prompts.longest_request
    decode: Callable[[Tokens], str] | None = None
    with suppress(ValueError):  # the model may come without a tokenizer
        decode = HubTokenizer(data["model"]).decode
    if decode is not None:
        place.check_metrics()
    engine = open_scoring_engine(
        data["model"], settings=row["settings"], max_model_len=longest, **data["engine"]
    )
    report_progress("0 the engine is ready")
    append_rows(record, [row])
    begin = time.perf_counter()
    try:
        place.score(
            LocalScorer(engine, decode).reply,
            row["run"],
            _BATCH_ON_GPU if torch.cuda.is_available() else _BATCH_ON_CPU,
            lambda count, what: report_progress(f"{count} {what}"),
        )
        row["backend"] = backend_report(engine, row["settings"])
        row["seconds"] = time.perf_counter() - begin
        append_rows(record, [row])
    finally:
        close_engine(engine)


def run_server(
    label: str, url: str, served_model: str | None, place: Workplace, on_progress: OnProgress
) -> str:
    """Score what the record lacks of a server; returns the run's key."""
    place.check_metrics()
    scorer = ServedScorer(url, served_model)
    about = _run_row("", place, label, scorer.model)
    key = run_key({"url": url, "sparsek": __version__, **about})
    place.missing(key, on_progress)
    append_rows(place.record, [about | {"run": key}])
    place.score(scorer.reply, key, _SERVER_BATCH, on_progress)
    return key


def _run_row(key: str, place: Workplace, label: str, model: str, **known: Any) -> dict[str, Any]:
    """A run's line of the record; ``known`` has a budget's settings: a server's are not known."""
    about = {"label": label, "settings": None, **known, "known": bool(known), "model": model}
    machine = asdict(describe_machine(choose_device(), place.commit))
    return {"kind": "run", "run": key, **about, "machine": machine}


if __name__ == "__main__":
    serve_job(work)

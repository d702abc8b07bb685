"""Runs of an evaluation: one for each local budget or server, continued from the record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsek_backend import __version__
from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.job import pending, score
from sparsek_backend.eval.options import server_of
from sparsek_backend.eval.prompt_file import PromptSet
from sparsek_backend.eval.record import append_rows, run_key
from sparsek_backend.eval.served import ServedScorer
from sparsek_backend.eval.workers import SILENCE_LIMIT, run_worker
from sparsek_backend.machine import choose_device, cpu_dtype, describe_machine

WORKER = "sparsek_backend.eval.worker"
_BATCH_ON_GPU, _BATCH_ON_CPU = 128, 4
_SERVER_BATCH = 32
_ENGINE_ON_GPU = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.8,  # log-probabilities of a prompt take some gigabytes beside
}
_ENGINE_ON_CPU = {"max_num_seqs": 8, "max_num_batched_tokens": 2048}

OnProgress = Callable[[int, str], None]


@dataclass(frozen=True)
class Workplace:
    """Where a run finds its prompts and leaves its scores."""

    prompts: PromptSet  # what is asked; ``prompts_file`` is the same on disk
    prompts_file: Path
    record: Path  # the JSON lines
    commit: str = ""  # to record where there is no git

    def missing(self, key: str, on_progress: OnProgress) -> PromptSet:
        """What the record lacks of a run; progress is told of the rest."""
        missing = pending(self.prompts, self.record, key)
        total = len(self.prompts.prompts) + len(self.prompts.texts)
        known = total - len(missing.prompts) - len(missing.texts)
        on_progress(known, f"{known} of {total} are in the record")
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
        """The run's key."""
        machine = describe_machine(choose_device(), commit)
        return run_key(
            {
                "model": self.name,
                "files": _fingerprint(Path(self.model)),
                "settings": budget.settings,
                "engine": self.arguments(),
                "sparsek": __version__,
                **asdict(machine),
            }
        )

    def run(self, budget: Budget, place: Workplace, on_progress: OnProgress) -> str:
        """Score what the record lacks, in a process of its own; returns the run's key.

        Raises:
            WorkerError: the engine failed; the message begins with the budget.
        """
        key = self.key(budget, place.commit)
        missing = place.missing(key, on_progress)
        if not (missing.prompts or missing.texts):
            return key
        settings = None if budget.settings is None else dict(budget.settings)
        on_gpu = torch.cuda.is_available()
        data = {
            "model": self.model,
            "settings": settings,
            "engine": self.arguments(),
            "prompts": str(place.prompts_file),
            "record": str(place.record),
            "run": key,
            "about": _about(budget.label, settings, self.name, known=True),
            "batch": _BATCH_ON_GPU if on_gpu else _BATCH_ON_CPU,
            "commit": place.commit,
        }

        def tell(message: str) -> None:
            count, _, what = message.partition(" ")
            on_progress(int(count), what)

        run_worker(
            WORKER, data, label=f"budget {budget.label!r}", on_progress=tell, timeout=SILENCE_LIMIT
        )
        return key


def run_server(
    text: str, served_model: str | None, place: Workplace, on_progress: OnProgress
) -> str:
    """Score what the record lacks of a server, written ``[LABEL=]URL``; returns the run's key."""
    label, url = server_of(text)
    scorer = ServedScorer(url, served_model)
    key = run_key({"url": url, "label": label, "model": scorer.model})
    missing = place.missing(key, on_progress)
    row = {"kind": "run", "run": key, **_about(label, None, scorer.model, known=False)}
    row["machine"] = asdict(describe_machine(choose_device(), place.commit))
    append_rows(place.record, [row])
    score(
        scorer, missing, record=place.record, run=key, batch=_SERVER_BATCH, on_progress=on_progress
    )
    return key


def _about(
    label: str, settings: Mapping[str, Any] | None, model: str, *, known: bool
) -> dict[str, Any]:
    return {"label": label, "settings": settings, "known": known, "model": model}


def _fingerprint(folder: Path) -> Sequence[object]:
    """Fingerprint of a folder of weights: a digest of its configuration, and its files' sizes."""
    if not folder.is_dir():
        return []
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    config = folder / "config.json"
    content = config.read_bytes() if config.is_file() else b""
    return [hashlib.sha256(content).hexdigest()[:16], [(f.name, f.stat().st_size) for f in files]]

"""What is measured in engines of two backends, each in processes of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sparsek_backend.bench.shapes import SHAPES, write_shape
from sparsek_backend.eval.record import append_rows, read_rows
from sparsek_backend.eval.workers import run_worker
from sparsek_backend.vllm_backend.names import BACKEND_NAME

Row = dict[str, Any]
"""A row of a result file by column; the columns that describe the machine come last."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model and the engines that serve it: of another backend, and of ours."""

    model: str  # model folder, or a name of `SHAPES`
    settings: Mapping[str, Any]  # our `sparsek` settings; empty for the defaults
    baseline: str | None  # vLLM backend to compare with, None for vLLM's own choice
    engine: Mapping[str, Any]  # further arguments of the engines
    seed: int = 0  # of the prompts

    def __post_init__(self) -> None:
        if self.model not in SHAPES and not Path(self.model).is_dir():
            names = ", ".join(SHAPES)
            raise ValueError(f"model: expected a folder or one of {names}, got {self.model!r}")

    @property
    def backends(self) -> tuple[str, str]:
        """Names of the baseline and of ours."""
        return self.baseline or "vLLM's own", BACKEND_NAME

    def settings_of(self, backend: str) -> str:
        """A backend's settings as a row has them."""
        if backend != BACKEND_NAME:
            return ""
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "defaults"

    def run(
        self,
        worker: str,
        job: Mapping[str, Any],
        *,
        backend: str,
        label: str,
        on_progress: Callable[[str], None],
    ) -> dict[str, Any]:
        """What a worker finds with one backend's engine, from it and a job.

        Raises:
            WorkerError: the engine failed.
        """
        ours, is_shape = backend == BACKEND_NAME, self.model in SHAPES
        on_progress(f"{label}: starting the engine")
        with tempfile.TemporaryDirectory(prefix="sparsek-shape-") as folder:
            engine = {
                "model": str(write_shape(self.model, Path(folder)) if is_shape else self.model),
                "settings": dict(self.settings) if ours else None,
                "baseline": None if ours else self.baseline,
                "engine": {**self.engine, **({"load_format": "dummy"} if is_shape else {})},
            }
            return run_worker(
                worker,
                {**job, **engine},
                label=label,
                on_progress=lambda line: on_progress(f"{label}: {line}"),
            )


class PlanFile:
    """JSON lines of one plan: a head, then what is measured; it is continued where it ends.

    Args:
        path: begun if there is none.
        plan: all that the lines depend on, beside the machine.
        machine: where they are measured. A file of another machine can be read, not continued.

    Raises:
        ValueError: the file is of another plan; the message says in what they differ.
    """

    command: ClassVar[str]  # of `sparsek bench`, whose file it is

    def __init__(self, path: Path, plan: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        self._path, self._here = path, dict(machine)
        if not read_rows(path):
            self.add({"plan": plan, "machine": machine})
        heads = [line for line in read_rows(path) if line.keys() >= {"plan", "machine"}]
        if not heads:
            raise ValueError(
                f"name: {path} is no file of `sparsek bench {self.command}`; give another name"
            )
        self.machine: dict[str, Any] = heads[0]["machine"]
        for head in heads:
            self._refuse_other(head["plan"], json.loads(json.dumps(plan)))
            self._refuse_other(head["machine"], self.machine)

    def check_machine(self) -> None:
        """Raise a ValueError if the lines were measured on another machine than this."""
        self._refuse_other(self.machine, self._here)

    def _refuse_other(self, other: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        differ = [name for name in now if other.get(name) != now[name]]
        if differ:
            said = ", ".join(f"{n} {other.get(n)!r} and not {now[n]!r}" for n in differ)
            raise ValueError(
                f"name: {self._path} was measured with {said}; give this run another name"
            )

    def add(self, line: Mapping[str, Any]) -> None:
        append_rows(self._path, [line])

    def lines(self) -> list[Row]:
        """What was measured, as it was added."""
        return [line for line in read_rows(self._path) if "plan" not in line]

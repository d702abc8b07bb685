"""The record of an evaluation: a JSON line for each score, appended as it is found.

An interrupted evaluation goes on where its record ends.  Lines of two kinds:

    {"kind": "run", "run": key, "label": ..., "settings": ..., "machine": ..., ...}
    {"kind": "prompt", "run": key, "task", "variant", "length", "index", "digest", "accuracy", ...}

A run's key is made of everything that its scores depend on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsek_backend.eval.prompt import Prompt
from sparsek_backend.malformed import expecting

Row = dict[str, Any]
_IDENTITY = ("task", "variant", "length", "index", "digest")
_DUE = {"run": {"label", "settings", "known"}, "prompt": {*_IDENTITY, "accuracy", "correct", "nll"}}
"""What a line of a kind has, beside its kind and run."""


def run_key(parts: Mapping[str, Any]) -> str:
    """A short name of everything that a run's scores depend on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def prompt_row(prompt: Prompt) -> Row:
    """The fields that identify a prompt in the record."""
    return {"kind": "prompt"} | {name: getattr(prompt, name) for name in _IDENTITY}


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identity of the prompt that a row scores; rows of two runs with one identity pair."""
    return tuple(row[name] for name in _IDENTITY)


def read_rows(path: Path) -> list[Row]:
    """Every whole line of a record; a missing file has none.

    An interrupted run may have left half a line at the end.

    Raises:
        ValueError: another line is no JSON object.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        with expecting(f"record: expected a JSON object in line {number} of {path}; move it"):
            rows.append({**json.loads(line)})
    return rows


def read_scores(path: Path) -> list[Row]:
    """The rows of a record of an evaluation.

    Raises:
        ValueError: the file is another.
    """
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        due = {"kind", "run", *_DUE.get(row.get("kind", ""), ())}
        if lacking := ", ".join(sorted(due - row.keys())):
            raise ValueError(
                f"record: expected a record of `sparsek eval`, in {path} line {number} lacks "
                f"{lacking}"
            )
    return rows


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append lines, in place of half a line at the end; several processes may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def pending(prompts: Iterable[Prompt], record: Path, run: str) -> list[Prompt]:
    """The prompts that a run has not scored yet."""
    rows = read_scores(record)
    done = {identity(row) for row in rows if (row["kind"], row["run"]) == ("prompt", run)}
    return [prompt for prompt in prompts if identity(prompt_row(prompt)) not in done]

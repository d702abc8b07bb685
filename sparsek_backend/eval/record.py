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
import lzma
from collections.abc import Iterable, Mapping, Sequence
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

    A file whose name ends in ``.xz`` is compressed.  An interrupted run may have left half a line
    at the end.

    Raises:
        ValueError: the file does not read, or another line is no JSON object.
    """
    if not path.is_file():
        return []
    with expecting(f"record: expected a record, {path} does not read"):
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
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


def adopt_dense(source: Path, record: Path, prompts: Sequence[Prompt], model: str) -> str:
    """Take dense attention's scores of prompts from another record; returns the run's key.

    Raises:
        ValueError: that record lacks some, or they are of another model.
    """
    rows = read_scores(source)
    dense = {row["run"]: row for row in rows if (row["kind"], row.get("label")) == ("run", "dense")}
    for about in dense.values():
        if about.get("model") != model:
            raise ValueError(
                f"reference: expected scores of {model}, got scores of {about.get('model')} in "
                f"{source}"
            )
    asked = {identity(prompt_row(prompt)) for prompt in prompts}
    found: dict[str, dict[tuple[Any, ...], Row]] = {run: {} for run in dense}
    for row in rows:
        if row["kind"] == "prompt" and row["run"] in found and identity(row) in asked:
            found[row["run"]][identity(row)] = row
    run = max(found, key=lambda key: len(found[key]), default="")
    scored = found.get(run, {})
    if len(scored) < len(asked):
        raise ValueError(
            f"reference: expected dense attention's scores of all {len(asked)} prompts, got "
            f"{len(scored)} in {source}"
        )
    missing = [scored[identity(prompt_row(each))] for each in pending(prompts, record, run)]
    append_rows(record, [dense[run], *missing] if missing else [])
    return run


def pending(prompts: Iterable[Prompt], record: Path, run: str) -> list[Prompt]:
    """The prompts that a run has not scored yet."""
    rows = read_scores(record)
    done = {identity(row) for row in rows if (row["kind"], row["run"]) == ("prompt", run)}
    return [prompt for prompt in prompts if identity(prompt_row(prompt)) not in done]

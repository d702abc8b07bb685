"""The record of an evaluation: a JSON line for each score, appended as it is found.

An interrupted evaluation goes on where its record ends.  Lines of three kinds:

    {"kind": "run", "run": key, "label": ..., "settings": ..., "machine": ..., ...}
    {"kind": "prompt", "run": key, "task", "variant", "length", "index", "digest", "accuracy", ...}
    {"kind": "text", "run": key, "name", "digest", "tokens", "nll", "nll_second_half"}

A run's key is made of everything that its scores depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsek_backend.eval.prompt import Prompt, Tokens

Row = dict[str, Any]
SCORES = ("prompt", "text")
"""Kinds of lines that are scores."""


def run_key(parts: Mapping[str, Any]) -> str:
    """A short name of everything that a run's scores depend on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def prompt_row(prompt: Prompt) -> Row:
    """The fields that identify a prompt in the record."""
    return {
        "kind": "prompt",
        "task": prompt.task,
        "variant": prompt.variant,
        "length": prompt.length,
        "index": prompt.index,
        "digest": prompt.digest,
    }


def text_row(name: str, tokens: Tokens) -> Row:
    """The fields that identify a text in the record."""
    digest = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()[:16]
    return {"kind": "text", "name": name, "digest": digest, "tokens": len(tokens)}


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identity of the prompt or text that a row scores; rows of two runs with one identity pair."""
    names = ("kind", "task", "variant", "length", "index", "name", "digest")
    return tuple(row.get(name) for name in names)


def read_rows(path: Path) -> list[Row]:
    """Every whole line of a record; a missing file has none.

    An interrupted run may have left half a line at the end.

    Raises:
        ValueError: another line is no JSON object.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"record: expected a JSON object in line {number} of {path}; move it")
        rows.append(row)
    return rows


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append lines, in place of half a line at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def scored(rows: Iterable[Mapping[str, Any]], run: str) -> set[tuple[Any, ...]]:
    """Identities of the prompts and texts that a run has scored already."""
    return {identity(row) for row in rows if row["run"] == run and row["kind"] in SCORES}

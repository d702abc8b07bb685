"""What a variant did to the answers: figures of each prompt, files of them, tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from .cost import cost
from .prompts import PromptRule
from .variants import SETS

DIGITS = 5
CONTEXTS = (16384, 32768, 131072)
"""Tokens of the prompts of which a table has the cost."""
OF_QUESTION = ("kl", "kl_median", "added_nll", "lost", "gained", "right")


def figures(
    reference: torch.Tensor, logits: torch.Tensor, target: torch.Tensor
) -> dict[str, float]:
    """KL(dense || variant) of an answer's rows, its loss, and whether its tokens are right.

    Args:
        reference: ``[rows, vocabulary]``, dense's logits.
        logits: the variant's.
        target: ``[rows]``, the right answer.
    """
    dense, found = reference.log_softmax(-1), logits.log_softmax(-1)
    divergence = (dense.exp() * (dense - found)).sum(-1).clamp(min=0)
    right = (found.argmax(-1) == target).float()
    return {
        "kl": round(divergence.mean().item(), DIGITS),
        "kl_max": round(divergence.max().item(), DIGITS),
        "nll": round(torch.nn.functional.nll_loss(found, target).item(), DIGITS),
        "right": float(right.all()),
        "tokens_right": round(right.mean().item(), DIGITS),
    }


def merge(folder: Path, commit: str) -> dict[str, Any]:
    """One document of the files of a folder, one a prompt: a summary for each variant.

    Args:
        folder: what ``run`` has written.
        commit: of the code that has run.
    """
    cells: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        if text := path.read_text(encoding="utf-8"):  # an empty one was taken, not finished
            row = json.loads(text)
            cells.setdefault((row["set"], row["model"], row["length"]), []).append(row)
    return {
        "commit": commit,
        "settings": {
            name: {variant.name: variant.settings() for variant in SETS[name]}
            for name in sorted({name for name, _, _ in cells})
        },
        "cells": [
            {"set": name, "model": model, "length": length, **_summary(rows)}
            for (name, model, length), rows in sorted(cells.items())
        ],
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    of_task: dict[str, list[dict[str, Any]]] = {}
    of_question: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_task.setdefault(f"{row['task']}, {row['variant']}", []).append(row["results"])
        place = "first" if row["task"] == "question_first" else row["variant"]
        of_question.setdefault(place, []).append(row["results"])
    return {
        "prompts": len(rows),
        "device": rows[0]["device"],
        "torch": rows[0]["torch"],
        "of_task": {name: len(found) for name, found in sorted(of_task.items())},
        "of_question": {name: len(found) for name, found in sorted(of_question.items())},
        "variants": {
            name: {
                **_means([row["results"] for row in rows], name),
                **_ratio([row["results"] for row in rows], name, "kl"),
                **_ratio([row["results"] for row in rows], name, "values_error"),
                "of_task": {
                    task: {key: _means(found, name)[key] for key in ("kl", "added_nll")}
                    for task, found in sorted(of_task.items())
                },
                "of_question": {
                    place: {key: _means(found, name)[key] for key in OF_QUESTION}
                    for place, found in sorted(of_question.items())
                },
            }
            for name in rows[0]["results"]
        },
    }


def _means(prompts: Sequence[dict[str, dict[str, float]]], name: str) -> dict[str, float]:
    rows, dense = [x[name] for x in prompts], [x["dense"] for x in prompts]
    pairs = list(zip(rows, dense, strict=True))
    kl = sorted(row["kl"] for row in rows)
    added = [row["nll"] - base["nll"] for row, base in pairs]
    found = {
        "kl": fmean(kl),
        "kl_error": _error(kl),
        "kl_median": median(kl),
        "kl_p90": kl[math.ceil(0.9 * len(kl)) - 1],
        "added_nll": fmean(added),
        "added_nll_error": _error(added),
        "lost": sum(row["right"] < base["right"] for row, base in pairs),
        "gained": sum(row["right"] > base["right"] for row, base in pairs),
    }
    others = ("nll", "right", "tokens_right", "attended", "mib_read", "share")
    found |= {key: fmean(row[key] for row in rows) for key in others}
    return {key: round(value, DIGITS) for key, value in found.items()}


def _ratio(prompts: Sequence[dict[str, dict[str, float]]], name: str, key: str) -> dict[str, float]:
    """The geometric mean, prompt by prompt, of ``key`` over that of the set's first variant.

    ``_error`` is the factor of one standard error.  Each figure counts as 1e-5 more: less is
    rounding.  Files of earlier versions have no ``values_error``.
    """
    first = next((one for one in prompts[0] if one != "dense"), name)
    if key not in prompts[0][first]:
        return {}
    logs = [math.log((x[name][key] + 1e-5) / (x[first][key] + 1e-5)) for x in prompts]
    found = {f"{key}_ratio": math.exp(fmean(logs)), f"{key}_ratio_error": math.exp(_error(logs))}
    return {key: round(value, DIGITS) for key, value in found.items()}


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def table(documents: Iterable[dict[str, Any]], chosen: str, variants: Sequence[str] = ()) -> str:
    """A Markdown table of a set, a line for each variant.

    Of variants that differ in the prompt it has the operations of a layer's attention, as shares of
    dense attention's, at lengths of :data:`CONTEXTS`.

    Args:
        documents: what ``merge`` has made.
        chosen: the set.
        variants: which of its variants; all, if none is named.
    """
    cells = [cell for document in documents for cell in document["cells"] if cell["set"] == chosen]
    rules = {variant.name: variant.prompt for variant in SETS[chosen]} | {"dense": PromptRule()}
    about = ["MiB"]
    if chosen != "decode":
        about = ["attended", *(f"cost {n >> 10}k" for n in CONTEXTS)]
    head = [f"{cell['model']}, {_thousands(cell['length'])}" for cell in cells]
    head = ["variant", *about, *head]
    lines = [head, ["---"] * len(head)]
    for name in variants or cells[0]["variants"]:
        found = [cell["variants"][name] for cell in cells]
        if chosen == "decode":
            about = [f"{found[-1]['mib_read']:.2f}"]
        else:
            costs = (sum(cost(rules[name], n)[0].values()) for n in CONTEXTS)
            about = [f"{found[-1]['share']:.0%}", *(f"{share:.3f}" for share in costs)]
        lines.append([name, *about, *map(_cell, found)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _thousands(length: int) -> str:
    return f"{length // (1000 if length % 1024 else 1024)}k"


def _cell(found: dict[str, float]) -> str:
    kl = f"{found['kl']:.4f} ± {found['kl_error']:.4f}"
    return f"{kl} ({found['kl_median']:.4f}), {found['added_nll']:+.3f}"

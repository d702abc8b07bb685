"""What a variant did to the answers: figures of each prompt, files of them, tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from .variants import SETS

DIGITS = 5


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


def merge(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """One document of the files of a folder, one a prompt, with a summary for each variant."""
    cells: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        if text := path.read_text(encoding="utf-8"):  # an empty one was claimed, not finished
            row = json.loads(text)
            cells.setdefault((row["set"], row["model"], row["length"]), []).append(row)
    return {
        **about,
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
    tasks = sorted({f"{row['task']}, {row['variant']}" for row in rows})
    of_task = {name: [r for r in rows if f"{r['task']}, {r['variant']}" == name] for name in tasks}
    return {
        "prompts": len(rows),
        "of_task": {name: len(found) for name, found in of_task.items()},
        "head_dim": rows[0]["head_dim"],
        "variants": {
            name: {
                **_means([row["results"][name] for row in rows]),
                "kl_of_task": {
                    task: round(fmean(row["results"][name]["kl"] for row in found), DIGITS)
                    for task, found in of_task.items()
                },
                "kl_of_prompt": [row["results"][name]["kl"] for row in rows],
            }
            for name in rows[0]["results"]
        },
    }


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    kl = sorted(row["kl"] for row in rows)
    error = stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan
    return {
        "kl": round(fmean(kl), DIGITS),
        "kl_error": round(error, DIGITS),
        "kl_p90": kl[math.ceil(0.9 * len(kl)) - 1],
        **{
            name: round(fmean(row[name] for row in rows), DIGITS)
            for name in rows[0]
            if name != "kl"
        },
    }


def table(documents: Iterable[dict[str, Any]], chosen: str) -> str:
    """A Markdown table of a set: a line for each variant, a column for each model and length."""
    cells = [cell for document in documents for cell in document["cells"] if cell["set"] == chosen]
    names = list(dict.fromkeys(name for cell in cells for name in cell["variants"]))
    head = [f"{cell['model']} {cell['length'] // 1000}k ({cell['prompts']})" for cell in cells]
    lines = [["variant", *head], ["---"] * (len(head) + 1)]
    for name in names:
        line = [name]
        for cell in cells:
            found = cell["variants"][name]
            read = f"{found['mib_read']:.2f} MiB" if chosen == "decode" else f"{found['share']:.2f}"
            line.append(
                f"{found['kl']:.4f} ± {found['kl_error']:.4f}; {found['right']:.3f}; {read}"
            )
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

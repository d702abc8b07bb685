"""What an evaluation found: every budget against dense, prompt by prompt."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.prompt import Prompt
from sparsek_backend.eval.record import Row, identity, prompt_row, read_scores
from sparsek_backend.eval.stats import divergence, mcnemar, mean_interval
from sparsek_backend.malformed import expecting

MEAN = "mean"
"""Stands for all tasks, each with the same weight."""


@dataclass(frozen=True)
class Run:
    """Everything that one budget, or one server, scored."""

    label: str  # the budget as written, or a server's
    about: Row  # its line of the record: label, settings, machine, backend, seconds
    rows: Sequence[Row]  # its scores


def collect_runs(
    rows: Sequence[Row], keys: Sequence[str] | None = None, prompts: Sequence[Prompt] | None = None
) -> list[Run]:
    """The runs of a record, in order.

    Args:
        keys: the runs wanted; ``None`` takes the latest of every label, dense attention first:
            of engines side by side, any may begin the record.
        prompts: those whose scores count; ``None`` takes all of the record.

    Raises:
        ValueError: no run, or one that is not in the record.
    """
    about: dict[str, Row] = {}
    latest: dict[str, str] = {}
    for row in rows:
        if row["kind"] == "run":
            seconds = about.get(row["run"], {}).get("seconds", 0.0) + row.get("seconds", 0.0)
            about[row["run"]] = {**row, "seconds": seconds}
            latest[row["label"]] = row["run"]
    if keys is None:
        keys = sorted(latest.values(), key=lambda key: about[key]["label"] != "dense")
    if not keys:
        raise ValueError("record: expected runs of an evaluation, it has none")
    if not about.keys() >= set(keys):
        raise ValueError(f"record: expected runs {list(keys)}, found {list(about)}")
    scores: dict[str, dict[tuple[Any, ...], Row]] = {key: {} for key in keys}
    asked = {identity(prompt_row(prompt)) for prompt in prompts or ()}
    for row in rows:
        counts = row["kind"] == "prompt" and (prompts is None or identity(row) in asked)
        if counts and row["run"] in scores:
            scores[row["run"]][identity(row)] = row
    return [Run(about[key]["label"], about[key], list(scores[key].values())) for key in keys]


def compare_runs(runs: Sequence[Run]) -> list[Row]:
    """One flat row for every run, variant, length and task, and one for the mean of the tasks.

    Each is over the prompts that the first run, the reference, scored too.
    """
    reference = {identity(row): row for row in runs[0].rows}
    found = []
    for run in runs:
        budget, known = Budget(run.label, run.about["settings"]), run.about["known"]
        cells: dict[tuple[str, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in run.rows:
            if old := reference.get(identity(row)):
                cells[row["variant"], row["length"]][row["task"]].append(_pair(old, row))
        for (variant, length), tasks in sorted(cells.items()):
            shares = {
                "prefill_share": budget.prefill_share(length) if known else None,
                "decode_share": budget.decode_share(length) if known else None,
            }
            cell = {MEAN: list(tasks.values())} if len(tasks) > 1 else {}
            cell |= {task: [of_task] for task, of_task in tasks.items()}
            for task, groups in cell.items():
                place = {"label": run.label, "task": task, "variant": variant, "length": length}
                found.append(place | shares | _compare(groups, is_reference=run is runs[0]))
    return found


def _pair(old: Row, new: Row) -> Row:
    """What is compared of a prompt that the reference and another run scored."""
    pair = {name: new[name] for name in ("accuracy", "correct", "nll")}
    pair |= {"of": old["accuracy"], "was_correct": old["correct"]}
    pair |= {f"delta_{name}": new[name] - old[name] for name in ("accuracy", "nll")}
    if "likely" in old and "likely" in new:
        places = divergence(old["likely"], new["likely"])
        # no token was decoded before the first: what it lost, the prompt lost
        pair |= {"kl": float(places.mean()), "kl_first": float(places[0])}
    return pair


def _compare(groups: Sequence[Sequence[Row]], *, is_reference: bool) -> Row:
    """A run's scores over some tasks, and their differences to the reference's."""
    pairs = [pair for group in groups for pair in group]
    cell: Row = {"prompts": len(pairs)}

    def add(*names: str) -> None:
        for name in names:
            interval = mean_interval([[pair[name] for pair in group] for group in groups])
            cell.update(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))

    add("accuracy")
    cell["correct"] = fmean(pair["correct"] for pair in pairs)
    cell["nll"] = fmean(fmean(pair["nll"] for pair in group) for group in groups)
    if is_reference:
        return cell
    add("delta_accuracy", "delta_nll")
    if all("kl" in pair for pair in pairs):
        add("kl", "kl_first")
    before = fmean(fmean(pair["of"] for pair in group) for group in groups)
    cell["of_reference"] = cell["accuracy"] / before if before else None
    tested = mcnemar([x["was_correct"] for x in pairs], [x["correct"] for x in pairs])
    return cell | dict(zip(("lost", "gained", "mcnemar_p"), tested, strict=True))


def worst_row(record: Path, prompts: Sequence[Prompt], reference: str, run: str) -> Row:
    """The row in which the interval of the NLL that a run adds to the reference's ends highest."""
    runs = collect_runs(read_scores(record), [reference, run], prompts)
    rows = [x for x in compare_runs(runs) if "delta_nll" in x]
    cells = [row for row in rows if row["task"] in (MEAN, "text")] or rows
    return max(cells, key=lambda row: float(row["delta_nll_high"]))


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """Warnings to print above the figures."""
    tasks = [row for row in rows if row["task"] != MEAN]
    scored = {(r["task"], r["variant"], r["length"], r["label"]): r["prompts"] for r in tasks}
    found = []
    for label, cell in itertools.product(
        dict.fromkeys(row["label"] for row in tasks), dict.fromkeys(key[:3] for key in scored)
    ):
        most = max(count for key, count in scored.items() if key[:3] == cell)
        if (count := scored.get((*cell, label), 0)) < most:
            what = f"{count} of {most} prompts were scored" if count else "no prompt was scored"
            found.append("{}, {}, {}, {} tokens: {}".format(label, *cell, what))
    for row in rows:
        whole = [(row[f"{x}_share"] or 0.0) > 0.9995 for x in ("prefill", "decode")]
        halved = "sparse_phase=" in row["label"]
        if row["label"] != "dense" and (all(whole) or (any(whole) and not halved)):
            found.append(
                f"{row['label']} attends 100 % of {row['length']} tokens: the figures there say "
                "nothing about sparsity"
            )
    return list(dict.fromkeys(found))


def read_results(paths: Sequence[Path]) -> dict[str, list[Row]]:
    """Rows of result JSONs by model, each cell from the last that has it.

    Raises:
        ValueError: a file is no such result.
    """
    found: dict[str, dict[tuple[Any, ...], Row]] = {}
    for path in paths:
        with expecting(f"{path}: expected the JSON of `sparsek eval`"):
            content = json.loads(path.read_text(encoding="utf-8"))
            cells = found.setdefault(str(content["model"]), {})
            for row in content["retrieval"]:
                _ = [row[name] for name in ("accuracy", "accuracy_low", "accuracy_high")]
                cells[row["variant"], row["length"], row["label"], row["task"]] = row
    return {model: list(cells.values()) for model, cells in found.items()}

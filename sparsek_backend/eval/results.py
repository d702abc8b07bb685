"""What an evaluation found: every budget against dense, prompt by prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sparsek_backend.config import ConfigError
from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.prompt import Prompt
from sparsek_backend.eval.record import SCORES, Row, identity, prompt_row, read_rows
from sparsek_backend.eval.stats import mcnemar, mean_interval

MEAN = "mean"
"""Stands for all tasks, each with the same weight."""


@dataclass(frozen=True)
class Run:
    """Everything that one budget, or one server, scored."""

    label: str  # the budget as written, or a server's label
    # its settings, ``None`` for dense or where only the server knows
    settings: Mapping[str, Any] | None
    known: bool  # whether the settings are known: a server's are not
    about: Row  # its line of the record: machine, backend, seconds
    rows: Sequence[Row]  # its scores

    def share(self, phase: str, length: int) -> float | None:
        """Attended share of the ``prefill`` or the ``decode`` at a length, where it is known."""
        if not self.known:
            return None
        budget = Budget(self.label, self.settings)
        try:
            return (budget.prefill_share if phase == "prefill" else budget.decode_share)(length)
        except ConfigError:  # settings of another version
            return None


def collect_runs(rows: Sequence[Row], keys: Sequence[str] | None = None) -> list[Run]:
    """The runs of a record, in order.

    Args:
        keys: the runs wanted; ``None`` takes the latest of every label.

    Raises:
        ValueError: no run, one that is not in the record, or a line of another kind of file.
    """
    for number, row in enumerate(rows, 1):
        due = {"kind", "run"}
        if row.get("kind") == "run":
            due |= {"label", "settings", "known"}
        if lacking := ", ".join(sorted(due - row.keys())):
            raise ValueError(
                f"record: expected a record of `sparsek eval`, line {number} lacks {lacking}"
            )
    about: dict[str, Row] = {}
    latest: dict[str, str] = {}
    for row in rows:
        if row["kind"] == "run":
            seconds = about.get(row["run"], {}).get("seconds", 0.0) + row.get("seconds", 0.0)
            about[row["run"]] = {**row, "seconds": seconds}
            latest[row["label"]] = row["run"]
    if keys is None:
        keys = list(latest.values())
    absent = [key for key in keys if key not in about]
    if absent or not keys:
        raise ValueError(f"record: expected runs {list(keys)}, found {list(about)}")
    scores: dict[str, dict[tuple[Any, ...], Row]] = {key: {} for key in keys}
    for row in rows:
        if row["kind"] in SCORES and row["run"] in scores:
            scores[row["run"]][identity(row)] = row
    return [
        Run(
            label=about[key]["label"],
            settings=about[key]["settings"],
            known=about[key]["known"],
            about=about[key],
            rows=list(scores[key].values()),
        )
        for key in keys
    ]


def retrieval_rows(runs: Sequence[Run]) -> list[Row]:
    """One flat row for every run, variant, length and task, and one for the mean of the tasks.

    Each is over the prompts that the first run, the reference, scored too.
    """
    reference = {identity(row): row for row in runs[0].rows if row["kind"] == "prompt"}
    found = []
    for run in runs:
        pairs = [(reference[identity(row)], row) for row in run.rows if identity(row) in reference]
        cells: dict[tuple[str, int], dict[str, list[tuple[Row, Row]]]] = {}
        for pair in pairs:
            tasks = cells.setdefault((pair[1]["variant"], pair[1]["length"]), {})
            tasks.setdefault(pair[1]["task"], []).append(pair)
        for (variant, length), tasks in sorted(cells.items()):
            shares = [run.share(phase, length) for phase in ("prefill", "decode")]
            cell = {MEAN: list(tasks.values())} if len(tasks) > 1 else {}
            cell |= {task: [of_task] for task, of_task in tasks.items()}
            for task, groups in cell.items():
                found.append(
                    {
                        "label": run.label,
                        "task": task,
                        "variant": variant,
                        "length": length,
                        "prefill_share": shares[0],
                        "decode_share": shares[1],
                        **_compare(groups, is_reference=run is runs[0]),
                    }
                )
    return found


def _compare(groups: Sequence[Sequence[tuple[Row, Row]]], *, is_reference: bool) -> Row:
    """A run's scores over some tasks, and their differences to the reference's."""

    def interval(value: Callable[[Row, Row], float]) -> tuple[float, float, float]:
        return mean_interval([[value(*pair) for pair in group] for group in groups])

    def cells(name: str, value: Callable[[Row, Row], float]) -> Row:
        columns = (name, f"{name}_low", f"{name}_high")
        return dict(zip(columns, interval(value), strict=True))

    pairs = [pair for group in groups for pair in group]
    cell = {
        "prompts": len(pairs),
        **cells("accuracy", lambda _, row: row["accuracy"]),
        "correct": sum(row["correct"] for _, row in pairs) / len(pairs),
        "nll": interval(lambda _, row: row["nll"])[0],
    }
    if is_reference:
        return cell
    before, _, _ = interval(lambda row, _: row["accuracy"])
    tested = mcnemar([old["correct"] for old, _ in pairs], [new["correct"] for _, new in pairs])
    cell |= cells("delta_accuracy", lambda old, new: new["accuracy"] - old["accuracy"])
    cell |= cells("delta_nll", lambda old, new: new["nll"] - old["nll"])
    cell["of_reference"] = cell["accuracy"] / before if before else None
    return cell | dict(zip(("lost", "gained", "mcnemar_p"), tested, strict=True))


def worst_row(record: Path, prompts: Sequence[Prompt], reference: str, run: str) -> Row:
    """The length and variant at which a run adds most NLL to the reference's: its row.

    The highest end of the interval counts.  The record may hold other prompts too.
    """
    asked = {identity(prompt_row(prompt)) for prompt in prompts}
    scored = [row for row in read_rows(record) if row["kind"] == "run" or identity(row) in asked]
    rows = [x for x in retrieval_rows(collect_runs(scored, [reference, run])) if "delta_nll" in x]
    cells = [row for row in rows if row["task"] == MEAN] or rows
    return max(cells, key=lambda row: float(row["delta_nll_high"]))


def perplexity_rows(runs: Sequence[Run]) -> list[Row]:
    """One flat row for every run that scored texts and every length of them, against the first."""
    reference = {identity(row): row for row in runs[0].rows if row["kind"] == "text"}
    found = []
    for run in runs:
        pairs = [(reference[identity(r)], r) for r in run.rows if identity(r) in reference]
        for length in sorted({row["tokens"] for _, row in pairs}):
            here = [pair for pair in pairs if pair[1]["tokens"] == length]
            found.append(
                {
                    "label": run.label,
                    "length": length,
                    "texts": len(here),
                    "prefill_share": run.share("prefill", length),
                    **_perplexity(here),
                }
            )
    return found


def _perplexity(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Perplexity of a run over texts, and its added NLL over the reference's."""

    def mean(value: Callable[[Row, Row], float]) -> float:
        return fmean(value(*pair) for pair in pairs)

    return {
        "ppl": math.exp(mean(lambda _, row: row["nll"])),
        "ppl_second_half": math.exp(mean(lambda _, row: row["nll_second_half"])),
        "delta_nll": mean(lambda old, new: new["nll"] - old["nll"]),
        "delta_nll_second_half": mean(
            lambda old, new: new["nll_second_half"] - old["nll_second_half"]
        ),
    }


def warnings_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings to print above the figures."""
    tasks = [row for row in rows if row.get("task") not in (None, MEAN)]
    wanted = max((row["prompts"] for row in tasks), default=0)
    found = [
        f"{row['label']}, {row['task']}, {row['variant']}, {row['length']} tokens: "
        f"{row['prompts']} of {wanted} prompts were scored"
        for row in tasks
        if row["prompts"] < wanted
    ]
    cells = dict.fromkeys((row["task"], row["variant"], row["length"]) for row in tasks)
    scored = {(row["label"], row["task"], row["variant"], row["length"]) for row in tasks}
    found += [
        f"{label}, {task}, {variant}, {length} tokens: no prompt was scored"
        for label in dict.fromkeys(row["label"] for row in tasks)
        for task, variant, length in cells
        if (label, task, variant, length) not in scored
    ]
    for row in rows:
        shares = [row[name] for name in ("prefill_share", "decode_share") if name in row]
        halved = "sparse_phase=" in row["label"]
        whole = [share is not None and share > 0.9995 for share in shares]
        is_dense = row["label"] == "dense"
        if not is_dense and (all(whole) or (any(whole) and not halved)):
            found.append(
                f"{row['label']} attends 100 % of {row['length']} tokens: the figures there say "
                "nothing about sparsity"
            )
    return list(dict.fromkeys(found))


def write_results(
    out: Path, name: str, runs: Sequence[Run], details: Mapping[str, Any]
) -> list[Path]:
    """Write NAME.csv, NAME.texts.csv and NAME.json; returns the paths of those with content."""
    out.mkdir(parents=True, exist_ok=True)
    retrieval, perplexity = retrieval_rows(runs), perplexity_rows(runs)
    written = []
    if retrieval:
        written.append(write_csv_file(out / f"{name}.csv", retrieval, digits=6))
    if perplexity:
        texts = out / f"{name}.texts.csv"
        written.append(write_csv_file(texts, perplexity, digits=6))
    document = {
        **details,
        "runs": [run.about for run in runs],
        "warnings": warnings_of([*retrieval, *perplexity]),
        "retrieval": retrieval,
        "perplexity": perplexity,
    }
    full = out / f"{name}.json"
    full.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return [*written, full]


def read_results(paths: Sequence[Path]) -> tuple[str, list[Row]]:
    """Model and retrieval rows of result JSONs, each cell from the last that has it.

    Raises:
        ValueError: a file is no such result, or they are of several models.
    """
    models, cells = [], {}
    drawn = ("prefill_share", "decode_share", "accuracy", "accuracy_low", "accuracy_high")
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            models.append(str(content["model"]))
            rows = content["retrieval"]
            for row in rows:
                absent = [name for name in drawn if name not in row]
                if absent:
                    raise ValueError(f"a row lacks {', '.join(absent)}")
                cells[row["variant"], row["length"], row["label"], row["task"]] = row
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected the JSON of `sparsek eval`: {error}") from error
    if len(set(models)) != 1 or not cells:
        raise ValueError(f"results: expected scores of one model, got {sorted(set(models))}")
    return models[0], list(cells.values())

"""The results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from sparsek_backend.command_line import number, whole_table
from sparsek_backend.eval.budgets import Budget
from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import MEAN


def result_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """For each length and variant: the budgets over all tasks, then task by task."""
    for length, variant in dict.fromkeys((row["length"], row["variant"]) for row in rows):
        here = [row for row in rows if (row["length"], row["variant"]) == (length, variant)]
        means = [row for row in here if row["task"] == MEAN] or here
        what = f"{length} tokens, {variant}"
        yield _against_reference(means, f"{what}: {means[0]['prompts']} prompts")
        if means is not here:
            yield _by_task(here, f"{what}: accuracy by task")


def _against_reference(rows: Sequence[Row], title: str) -> Table:
    """Shares in per cent of the prefill's and the decode's keys; intervals are in the CSV."""
    names = ("attended", "accuracy", "of dense", "-/+", "p", "added NLL", "KL")
    table = _table(title, "budget", *names)
    for row in rows:
        shares = (number(row[f"{phase}_share"], ".0%") for phase in ("prefill", "decode"))
        table.add_row(
            row["label"],
            "/".join(shares),
            f"{row['accuracy']:.3f}",
            number(row.get("of_reference"), ".1%"),
            f"{row['lost']}/{row['gained']}" if "lost" in row else "-",
            number(row.get("mcnemar_p"), ".2g"),
            number(row.get("delta_nll"), "+.3f"),
            number(row.get("kl"), ".4f"),
        )
    return table


def _by_task(rows: Sequence[Row], title: str) -> Table:
    labels = list(dict.fromkeys(row["label"] for row in rows))
    table = _table(title, "task", *labels)
    for task in dict.fromkeys(row["task"] for row in rows if row["task"] != MEAN):
        cells = {row["label"]: row for row in rows if row["task"] == task}
        shown = (number(cells.get(label, {}).get("accuracy"), ".3f") for label in labels)
        table.add_row(task, *shown)
    return table


def tuning_table(tried: Sequence[tuple[Budget, Row]], length: int, loss: float) -> Table:
    """Pairs of numbers with what they attend of a length, and the rows in which they lose most."""
    names = ("decode_tokens", "prefill", "decode", "added NLL", "interval", f"holds {loss:g}")
    table = _table(f"at {length} tokens", "top_k", *names)
    for budget, row in tried:
        table.add_row(
            str(budget.config.top_k),
            str(budget.config.decode_tokens),
            f"{budget.prefill_share(length):.0%}",
            f"{budget.decode_share(length):.0%}",
            f"{row['delta_nll']:+.3f}",
            f"{row['delta_nll_low']:+.3f}..{row['delta_nll_high']:.3f}",
            "yes" if row["delta_nll_high"] <= loss else "no",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    """A table that has room for its figures in 80 columns."""
    table = whole_table(first, *others, title=title, min_width=len(title))
    for column in table.columns[1:]:
        column.justify, column.max_width = "right", 13
    return table

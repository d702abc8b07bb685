"""What an evaluation found: per budget, against dense; as CSV, JSON and a table."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from sparsek_backend.eval.tasks import PasskeyScore, TextScore


@dataclass(frozen=True)
class BudgetResult:
    """Scores of one budget.

    Args:
        label: the budget as written, or the label of a server.
        settings: its `sparsek` settings, None for dense or where only the server knows.
        attended_share: mean share of the keys that its policy attends over the texts' positions,
            None where it is not known.
        perplexity: scores per text.
        passkey: scores per probe.
        seconds: wall time of the scoring.
        backend: what ran, e.g. `SPARSEK, 1200 forward calls`.
    """

    label: str
    settings: dict[str, Any] | None
    attended_share: float | None
    perplexity: list[TextScore] = field(default_factory=list)
    passkey: list[PasskeyScore] = field(default_factory=list)
    seconds: float = 0.0
    backend: str = ""

    @property
    def nll(self) -> float | None:
        """Mean NLL over the texts, nats per token."""
        return _mean([score.nll for score in self.perplexity])

    @property
    def nll_second_half(self) -> float | None:
        """Mean NLL over the second halves."""
        return _mean([score.nll_second_half for score in self.perplexity])

    @property
    def passkey_accuracy(self) -> float | None:
        """Share of the probes answered rightly."""
        return _mean([float(score.correct) for score in self.passkey])

    @property
    def passkey_nll(self) -> float | None:
        """Mean NLL of the right answer."""
        return _mean([score.answer_nll for score in self.passkey])

    @staticmethod
    def from_json(data: dict[str, Any]) -> BudgetResult:
        """The inverse of `dataclasses.asdict`."""
        values = dict(data)
        values["perplexity"] = [TextScore(**score) for score in data["perplexity"]]
        values["passkey"] = [PasskeyScore(**score) for score in data["passkey"]]
        return BudgetResult(**values)


COLUMNS = (
    "budget",
    "attended_share",
    "ppl",
    "ppl_second_half",
    "delta_nll",
    "delta_nll_second_half",
    "passkey_accuracy",
    "passkey_nll",
    "seconds",
)


def summary_rows(results: Sequence[BudgetResult]) -> list[dict[str, Any]]:
    """One flat row per budget; differences are against the first result, the reference."""
    reference = results[0]
    return [
        {
            "budget": result.label,
            "attended_share": result.attended_share,
            "ppl": None if result.nll is None else math.exp(result.nll),
            "ppl_second_half": None
            if result.nll_second_half is None
            else math.exp(result.nll_second_half),
            "delta_nll": _difference(result.nll, reference.nll),
            "delta_nll_second_half": _difference(result.nll_second_half, reference.nll_second_half),
            "passkey_accuracy": result.passkey_accuracy,
            "passkey_nll": result.passkey_nll,
            "seconds": result.seconds,
        }
        for result in results
    ]


def write_results(
    out: Path, name: str, results: Sequence[BudgetResult], details: dict[str, Any]
) -> list[Path]:
    """Write NAME.csv (the summary) and NAME.json (everything); returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    rows = summary_rows(results)
    table, full = out / f"{name}.csv", out / f"{name}.json"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _text(value) for key, value in row.items()})
    document = {**details, "summary": rows, "results": [asdict(result) for result in results]}
    full.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return [table, full]


def summary_table(results: Sequence[BudgetResult]) -> Table:
    """The summary for the terminal."""
    table = Table(title="what the budget costs", title_justify="left")
    table.add_column("budget")
    for name in ("attended", "ppl", "ppl 2nd half", "ΔNLL", "ΔNLL 2nd half", "passkey"):
        table.add_column(name, justify="right")
    table.add_column("answer NLL", justify="right")
    table.add_column("s", justify="right")
    for row in summary_rows(results):
        table.add_row(
            row["budget"],
            _show(row["attended_share"], ".1%"),
            _show(row["ppl"], ".2f"),
            _show(row["ppl_second_half"], ".2f"),
            _show(row["delta_nll"], "+.4f"),
            _show(row["delta_nll_second_half"], "+.4f"),
            _show(row["passkey_accuracy"], ".0%"),
            _show(row["passkey_nll"], ".3f"),
            _show(row["seconds"], ".0f"),
        )
    return table


def _show(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _difference(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value - reference


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

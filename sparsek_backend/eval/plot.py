"""The picture of an evaluation: loss against what is attended, and the passkeys found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsek_backend.eval.results import BudgetResult, summary_rows
from sparsek_backend.pyplot import import_pyplot


def plot_results(results: Sequence[BudgetResult], path: Path, title: str) -> Path:
    """Write one PNG.

    Raises:
        ImportError: matplotlib is missing; the message has the install command.
    """
    pyplot = import_pyplot()
    rows = summary_rows(results)
    panels = [_draw_loss] if results[0].perplexity else []
    panels += [_draw_passkey] if results[0].passkey else []
    figure, axes = pyplot.subplots(
        1,
        max(len(panels), 1),
        figsize=(6.5 * max(len(panels), 1), 1.8 + 0.45 * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for axis, draw in zip(axes[0], panels, strict=False):
        draw(axis, rows)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    shares = [row["attended_share"] for row in rows]
    return [
        row["budget"] if share is None else f"{row['budget']}\n{share:.0%} attended"
        for row, share in zip(rows, shares, strict=True)
    ]


def _draw_loss(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    whole = [row["delta_nll"] or 0.0 for row in rows]
    second = [row["delta_nll_second_half"] or 0.0 for row in rows]
    at = range(len(rows))
    axis.barh([y - 0.2 for y in at], whole, 0.4, label="whole text", color="#9ab8d4")
    axis.barh([y + 0.2 for y in at], second, 0.4, label="second half", color="#1b6ca8")
    for y, value in zip(at, second, strict=True):
        axis.text(max(value, 0.0), y + 0.2, f" {value:+.4f}", va="center", fontsize=8)
    axis.set_yticks(list(at), _labels(rows), fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.axvline(0.0, color="black", linewidth=1)
    axis.set_xlabel("added NLL against dense, nats per token (less is better)")
    axis.legend(fontsize=8)


def _draw_passkey(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    values = [row["passkey_accuracy"] or 0.0 for row in rows]
    at = range(len(rows))
    axis.barh(list(at), values, 0.5, color="#3f9142")
    for y, row in zip(at, rows, strict=True):
        text = f" {row['passkey_accuracy']:.0%}, answer NLL {row['passkey_nll']:.2f}"
        axis.text(row["passkey_accuracy"], y, text, va="center", fontsize=8)
    axis.set_yticks(list(at), _labels(rows), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.6)
    axis.set_xlabel("passkeys found (more is better)")

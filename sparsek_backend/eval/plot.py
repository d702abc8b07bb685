"""The picture of an evaluation: accuracy over attended share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import MEAN
from sparsek_backend.pyplot import import_pyplot, write_figure

_COLOURS = {"block_topk": "#1b6ca8", "sink_window": "#e07a1f", "window": "#6b6b6b"}
_MARKERS = {"both": "o", "prefill": "^", "decode": "v"}


def plot_accuracy(rows: Sequence[Row], path: Path, model: str) -> Path:
    """Draw one panel for each length and variant."""
    pyplot = import_pyplot()
    means = [row for row in rows if row["task"] == MEAN] or list(rows)
    variants = list(dict.fromkeys(row["variant"] for row in means))
    lengths = sorted({row["length"] for row in means})
    figure, axes = pyplot.subplots(
        len(variants),
        len(lengths),
        figsize=(5.2 * len(lengths), 4.2 * len(variants)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, variant in zip(axes, variants, strict=True):
        for axis, length in zip(line, lengths, strict=True):
            here = [r for r in means if (r["variant"], r["length"]) == (variant, length)]
            if not here:
                axis.set_axis_off()
                continue
            _draw(axis, here)
            axis.set_title(f"{length} tokens, {variant}", fontsize=10)
            axis.set_xlabel("share of the keys that a prompt attends")
            axis.set_ylabel("mean accuracy, 95 % interval")
            axis.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"Answers of {model}, dense and sparse")
    return write_figure(figure, path)


def _draw(axis: Any, rows: Sequence[Row]) -> None:
    """Draw a point for every budget, a line through each mode's points, and dense as a level."""
    reference, others = rows[0], rows[1:]
    axis.axhline(reference["accuracy"], color="black", linewidth=1, label=reference["label"])
    axis.axhspan(
        reference["accuracy_low"], reference["accuracy_high"], color="black", alpha=0.08, lw=0
    )
    series: dict[tuple[str, str], list[Row]] = {}
    for row in others:
        mode, _, _ = row["label"].replace(",", ":").partition(":")
        _, _, phase = row["label"].partition("sparse_phase=")
        series.setdefault((mode, phase.split(",")[0] or "both"), []).append(row)
    for (mode, phase), members in series.items():
        members = sorted(members, key=lambda row: row["prefill_share"] or 1.0)
        x = [_share(row, phase) for row in members]
        y = [row["accuracy"] for row in members]
        below = [row["accuracy"] - row["accuracy_low"] for row in members]
        above = [row["accuracy_high"] - row["accuracy"] for row in members]
        axis.errorbar(
            x,
            y,
            yerr=[below, above],
            marker=_MARKERS.get(phase, "o"),
            color=_COLOURS.get(mode),
            linestyle="-" if phase == "both" else ":",
            capsize=3,
            alpha=1.0 if phase == "both" else 0.5,
            label=mode if phase == "both" else f"{mode}, sparse {phase}",
        )
    axis.set_xlim(0.0, 1.02)
    axis.set_ylim(0.0, 1.02)
    axis.grid(alpha=0.3)


def _share(row: Row, phase: str) -> float:
    share = row["decode_share" if phase == "decode" else "prefill_share"]
    return 1.0 if share is None else share

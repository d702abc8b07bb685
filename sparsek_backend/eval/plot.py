"""The picture of an evaluation: accuracy and KL divergence over the length of the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import MEAN
from sparsek_backend.pyplot import import_pyplot, write_figure

_DRAWN = {"accuracy": "mean accuracy", "kl": "KL from dense attention, nats a token"}


def plot_results(results: Mapping[str, Sequence[Row]], path: Path) -> Path:
    """Draw a column for each model and variant, a row for what its results have, a line a budget.

    Bars are 95 % intervals.  Texts are drawn where there is nothing else.
    """
    pyplot = import_pyplot()
    columns: dict[str, list[Row]] = {}
    for model, rows in results.items():
        asked = [row for row in rows if row["variant"] != "text"] or rows
        means = [row for row in asked if row["task"] == MEAN] or asked
        for variant in dict.fromkeys(row["variant"] for row in means):
            columns[f"{model}, {variant}"] = [row for row in means if row["variant"] == variant]
    drawn = [x for x in _DRAWN if any(x in row for rows in columns.values() for row in rows)]
    figure, axes = pyplot.subplots(
        len(drawn),
        len(columns),
        figsize=(5.2 * len(columns), 3.4 * len(drawn)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    labels = dict.fromkeys(row["label"] for rows in columns.values() for row in rows)
    colours = {label: f"C{i}" for i, label in enumerate(labels)} | {"dense": "black"}
    for name, line in zip(drawn, axes, strict=True):
        for axis, rows in zip(line, columns.values(), strict=True):
            for label in labels:
                cells = [row for row in rows if row["label"] == label and name in row]
                _draw(axis, cells, name, label=label, color=colours[label])
            axis.grid(alpha=0.3)
        line[0].set_ylabel(_DRAWN[name])
        if name == "kl":
            line[0].set_yscale("symlog", linthresh=1e-3)
        line[0].set_ylim(bottom=0.0)
    for title, top, bottom in zip(columns, axes[0], axes[-1], strict=True):
        top.set_title(title, fontsize=10)
        bottom.set_xlabel("tokens of the prompt")
    named: dict[str, Any] = {}
    for top in axes[0]:
        handles, names = top.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    figure.legend(named.values(), named, loc="outside lower center", ncols=2, fontsize=8)
    lengths = sorted({row["length"] for rows in columns.values() for row in rows})
    axes[0][0].set_xscale("log", base=2)
    axes[0][0].set_xticks(lengths, [f"{length / 1024:.3g}k" for length in lengths])
    axes[0][0].minorticks_off()
    return write_figure(figure, path)


def _draw(axis: Any, cells: Sequence[Row], name: str, **style: str) -> None:
    if cells := sorted(cells, key=lambda row: row["length"]):
        ends = [[abs(row[f"{name}_{end}"] - row[name]) for row in cells] for end in ("low", "high")]
        x, y = ([row[of] for row in cells] for of in ("length", name))
        axis.errorbar(x, y, yerr=ends, marker="o", capsize=3, **style)

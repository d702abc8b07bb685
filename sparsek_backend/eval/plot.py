"""The picture of an evaluation: accuracy and KL divergence over the context, and speed below."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from sparsek_backend.eval.record import Row
from sparsek_backend.eval.results import MEAN
from sparsek_backend.malformed import expecting
from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_backend.vllm_backend.names import BACKEND_NAME

_DRAWN = {"accuracy": "mean accuracy", "kl": "KL from dense attention, nats a token"}
_TIMED = {"ttft_ms": "first token", "tpot_ms": "each further token"}
_STYLES = ("-", "--", ":", "-.")
"""Lines of the models, in their order."""


def plot_results(
    results: Mapping[str, Sequence[Row]], path: Path, served: Path | None = None
) -> Path:
    """Draw a column for each variant, a row for what its results have, a line a model and budget.

    Bars are 95 % intervals.  Texts are drawn where there is nothing else.

    Args:
        served: the CSV of `sparsek bench serve`, whose speed-ups are drawn below.

    Raises:
        ValueError: no results, or ``served`` is no such file.
    """
    pyplot = import_pyplot()
    shown: list[Row] = []
    for model, rows in results.items():
        asked = [row for row in rows if row["variant"] != "text"] or rows
        means = [row for row in asked if row["task"] == MEAN] or asked
        shown += [{**row, "model": model} for row in means]
    if not shown:
        raise ValueError("results: expected scores to draw, found none")
    labels, variants = (dict.fromkeys(row[of] for row in shown) for of in ("label", "variant"))
    drawn = [name for name in _DRAWN if any(name in row for row in shown)]
    speeds = {} if served is None else _read_speeds(served)
    figure, axes = pyplot.subplots(
        height := len(drawn) + bool(speeds),
        len(variants),
        figsize=(max(5.2 * len(variants), 8.4), 1.0 + 2.7 * height),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    colours = {label: f"C{i}" for i, label in enumerate(labels)} | {"dense": "black"}
    styles = dict(zip(results, _STYLES * len(results), strict=False))
    for name, line in zip(drawn, axes, strict=False):
        places = zip(line, variants, strict=True)
        for (axis, variant), model, label in product(places, results, labels):
            wanted = {"variant": variant, "model": model, "label": label}
            style = {"color": colours[label], "linestyle": styles[model]}
            cells = [row for row in shown if row.items() >= wanted.items() and name in row]
            _draw(axis, cells, name, label=f"{model}: {label}", **style)
        line[0].set_ylabel(_DRAWN[name])
        if name == "kl":
            line[0].set_yscale("symlog", linthresh=1e-3)
        line[0].set_ylim(bottom=0.0)
    for axis in axes[-1] if speeds else ():
        for number, (label, points) in enumerate(speeds.items(), len(labels)):
            line = zip(*sorted(points.items()), strict=True)
            axis.plot(*line, marker="s", label=label, color=f"C{number}")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel("times as fast as dense")
        axis.legend(fontsize=8)
    named: dict[str, Any] = {}
    for variant, top, bottom in zip(variants, axes[0], axes[-1], strict=True):
        top.set_title(variant, fontsize=10)
        bottom.set_xlabel("tokens of the context")
        handles, names = top.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    figure.legend(named.values(), named, loc="outside lower center", ncols=2, fontsize=8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    lengths = sorted({row["length"] for row in shown}.union(*speeds.values()))
    axes[0][0].set_xscale("log", base=2)
    axes[0][0].set_xticks(lengths, [f"{length / 1024:.3g}k" for length in lengths])
    axes[0][0].minorticks_off()
    return write_figure(figure, path)


def _draw(axis: Any, cells: Sequence[Row], name: str, **style: str) -> None:
    if cells := sorted(cells, key=lambda row: row["length"]):
        ends = [[abs(row[f"{name}_{end}"] - row[name]) for row in cells] for end in ("low", "high")]
        x, y = ([row[of] for row in cells] for of in ("length", name))
        axis.errorbar(x, y, yerr=ends, marker="o", capsize=3, **style)


def _read_speeds(path: Path) -> dict[str, dict[int, float]]:
    """By what was timed: how many times as fast ours was at each context."""
    found: dict[str, dict[int, float]] = {}
    with expecting(f"{path}: expected the CSV of `sparsek bench serve`"):
        with path.open(newline="", encoding="utf-8") as file:
            rows = {(x["requests"], x["context"], x["backend"]): x for x in csv.DictReader(file)}
        for (requests, context, backend), theirs in rows.items():
            if backend == BACKEND_NAME:
                continue
            ours = rows[requests, context, BACKEND_NAME]
            for name, what in _TIMED.items():
                label = f"{ours['model']}, {requests} requests: {what}"
                found.setdefault(label, {})[int(context)] = float(theirs[name]) / float(ours[name])
    return found

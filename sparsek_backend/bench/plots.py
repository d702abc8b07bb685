"""Plots of a result file; losses are drawn like gains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.results import Row, read_csv, speedup
from sparsek_backend.pyplot import import_pyplot, write_figure

_COLOURS = ("#1b6ca8", "#e07a1f", "#3f9142", "#b03a5b", "#7a5ba6", "#6b6b6b", "#2aa198")


def plot_csv(csv_path: Path, out_dir: Path) -> list[Path]:
    """Draw one PNG per op of a result file: times, and ours against each peer.

    Raises:
        ValueError: the file is no result file.
    """
    pyplot = import_pyplot()
    rows = read_csv(csv_path)
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for op in dict.fromkeys(row.op for row in rows):
        timed = [row for row in rows if row.op == op and row.is_timed]
        if not timed:
            continue
        figure = _figure(pyplot, op, timed)
        path = out_dir / f"{csv_path.stem}_{re.sub(r'[^A-Za-z0-9_-]', '-', op)}.png"
        written.append(write_figure(figure, path))
    return written


def _figure(pyplot: Any, op: str, rows: list[Row]) -> Any:
    cases = list(dict.fromkeys((row.case, row.spec) for row in rows))
    names = sorted({row.provider for row in rows}, key=lambda name: (name != OURS, name))
    colours = dict(zip(names, _COLOURS * len(names), strict=False))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, 1.6 + 0.24 * (len(rows) + len(cases))), layout="constrained", sharey=True
    )
    ticks, y = [], 0
    for case in cases:
        group = sorted(
            (row for row in rows if (row.case, row.spec) == case),
            key=lambda row: names.index(row.provider),
        )
        ratios = {}
        if group[0].provider == OURS:
            ratios = speedup(group, group[0])
        ticks.append(y + (len(group) - 1) / 2)
        for row in group:
            _draw_time(left, y, row, colours[row.provider])
            if row.provider in ratios:
                ratio, hatch = ratios[row.provider], "" if ratios[row.provider] >= 1 else "///"
                right.barh([y], [ratio], 0.9, color=colours[row.provider], hatch=hatch)
                right.text(ratio, y, f" {ratio:.2f}x", va="center", fontsize=7)
            y += 1
        y += 1
    left.set_xscale("log")
    left.margins(x=0.3)
    left.grid(axis="x", alpha=0.3)
    right.margins(x=0.1)
    left.set_xlabel("milliseconds, median with p20 and p80 (less is better)")
    left.set_yticks(ticks, [f"{case}\n{spec}" for case, spec in cases], fontsize=8)
    left.invert_yaxis()
    right.axvline(1.0, color="black", linewidth=1)
    right.set_xlabel("peer's time / ours (hatched, left of 1: ours is slower)")
    notes = {row.provider: f" ({row.note})" for row in rows if row.note}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    labels = [name + notes.get(name, "") for name in names]
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="outside lower center")
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    figure.suptitle(f"{op}: {rows[0].gpu}, torch {rows[0].torch}, commit {commits}")
    return figure


def _draw_time(axes: Any, y: int, row: Row, colour: str) -> None:
    ms = row.ms or 0.0
    low, high = row.p20_ms or ms, row.p80_ms or ms
    spread = [[max(ms - low, 0)], [max(high - ms, 0)]]
    axes.errorbar([ms], [y], xerr=spread, fmt="o", color=colour)  # a log axis has no zero for bars
    rate = f", {row.tb_s:.2g} TB/s" if row.tb_s else ""
    rate = f", {row.tflops:.0f} TFLOP/s" if (row.tflops or 0) >= 50 else rate
    axes.text(max(high, ms), y, f"   {ms:.3g} ms{rate}", va="center", fontsize=7)

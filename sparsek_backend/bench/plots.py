"""Plots of a result file; losses are drawn like gains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.results import Row, read_csv, speedup

_COLOURS = ("#1b6ca8", "#e07a1f", "#3f9142", "#b03a5b", "#7a5ba6", "#6b6b6b", "#2aa198")


def plot_csv(csv_path: Path, out_dir: Path) -> list[Path]:
    """Draw one PNG per op of a result file: times, and ours against each peer.

    Raises:
        ImportError: matplotlib is missing; the message has the install command.
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
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    return written


def import_pyplot() -> Any:
    """matplotlib's pyplot on the file-only backend."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'sparsek-backend[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def _figure(pyplot: Any, op: str, rows: list[Row]) -> Any:
    cases = list(dict.fromkeys((row.case, row.spec) for row in rows))
    providers = sorted({row.provider for row in rows}, key=lambda name: (name != OURS, name))
    colours = dict(zip(providers, _COLOURS * len(providers), strict=False))
    by_key = {row.key[1:]: row for row in rows}
    height = 1.2 + 0.28 * len(cases) * (len(providers) + 1)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, max(height, 3.5)), layout="constrained", sharey=True
    )
    step = 1.0 / (len(providers) + 1)
    for index, provider in enumerate(providers):
        drawn = [(y, by_key[(*case, provider)]) for y, case in enumerate(cases)
                 if (*case, provider) in by_key]  # fmt: skip
        if not drawn:
            continue
        offsets = [y + index * step for y, _ in drawn]
        times = [row.ms or 0.0 for _, row in drawn]
        spread = [
            [max(ms - (row.p20_ms or ms), 0) for ms, (_, row) in zip(times, drawn, strict=True)],
            [max((row.p80_ms or ms) - ms, 0) for ms, (_, row) in zip(times, drawn, strict=True)],
        ]
        label = provider + next((f" ({row.note})" for _, row in drawn if row.note), "")
        left.barh(offsets, times, step, xerr=spread, color=colours[provider], label=label)
        for y, ms, (_, row) in zip(offsets, times, drawn, strict=True):
            rate = f"{row.tflops:.0f} TFLOP/s" if (row.tflops or 0) > 1 else f"{row.tb_s:.2g} TB/s"
            left.text(ms, y, f" {ms:.3g} ms, {rate}", va="center", fontsize=7)
        _draw_ratios(right, drawn, offsets, step, by_key, rows, colours[provider])
    left.set_xscale("log")
    left.margins(x=0.25)
    left.set_xlabel("milliseconds, median with p20 and p80 (less is better)")
    left.set_yticks([y + 0.5 - step for y in range(len(cases))])
    left.set_yticklabels([f"{case}\n{spec}" for case, spec in cases], fontsize=8)
    left.invert_yaxis()
    left.legend(fontsize=7, loc="lower right")
    right.axvline(1.0, color="black", linewidth=1)
    right.set_xlabel("peer's time / ours (left of 1: ours is slower)")
    figure.suptitle(f"{op}: {rows[0].gpu}, torch {rows[0].torch}, commit {rows[0].commit}")
    return figure


def _draw_ratios(
    axes: Any,
    drawn: list[tuple[int, Row]],
    offsets: list[float],
    step: float,
    by_key: dict[tuple[str, str, str], Row],
    rows: list[Row],
    colour: str,
) -> None:
    for y, (_, row) in zip(offsets, drawn, strict=True):
        ours = by_key.get((row.case, row.spec, OURS))
        ratio = None if ours is None else speedup(rows, ours).get(row.provider)
        if ratio is None:
            continue
        axes.barh([y], [ratio], step, color=colour, hatch="" if ratio >= 1 else "///")
        axes.text(ratio, y, f" {ratio:.2f}x", va="center", fontsize=7)

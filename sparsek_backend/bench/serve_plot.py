"""The plot of `sparsek bench serve`: both backends over the context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_backend.vllm_backend.names import BACKEND_NAME

_COLOURS = {True: "#1b6ca8", False: "#6b6b6b"}
_MARKERS = {True: "o", False: "s"}
"""By whether they are ours."""

Records = Sequence[Mapping[str, Any]]


def plot_serve(records: Records, path: Path) -> None:
    """Draw time to first token and time per output token against the context.

    Args:
        records: rows of `sparsek bench serve`; of several files, if of one model and machine.

    Raises:
        ValueError: no records, or of several models or GPUs.
    """
    pyplot = import_pyplot()
    about = {(row["model"], row["gpu"], row["vllm"]) for row in records}
    if len(about) != 1:
        raise ValueError(f"records: expected one model, GPU and vLLM version, got {sorted(about)}")
    ((model, gpu, vllm),) = about
    figure, (first, each) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    together = sorted({int(row["requests"]) for row in records})
    alone = [row for row in records if int(row["requests"]) == together[0]]
    # The first token is of one request at a time, however many decode together.
    _draw_lines(first, alone, "ttft_ms", "{backend}")
    first.set_title("time to first token, one request", fontsize=10)
    first.set_yscale("log")
    first.yaxis.set_major_formatter(pyplot.FuncFormatter(lambda ms, _: f"{ms:g}"))
    _draw_lines(each, records, "tpot_ms", "{backend}, {requests} together")
    each.set_title("time per output token", fontsize=10)
    contexts = sorted({int(row["context"]) for row in records})
    sizes = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in contexts]
    for axis in (first, each):
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, sizes)
        axis.margins(x=0.08, y=0.15)
        axis.set_xlabel("tokens of context")
        axis.set_ylabel("milliseconds (less is better)")
        axis.grid(visible=True, which="major", alpha=0.25)
        axis.legend(fontsize=8, loc="upper left")
    each.set_ylim(bottom=0)
    for axis, field, rows in ((first, "ttft_ms", alone), (each, "tpot_ms", records)):
        _write_ratios(axis, rows, field)
    figure.suptitle(f"{model}, {gpu}, vLLM {vllm}", fontsize=11)
    write_figure(figure, path)


def _draw_lines(axis: Any, records: Records, y: str, label: str) -> None:
    """A line of ``y`` over the context for each label that the records give."""
    for name in dict.fromkeys(label.format_map(row) for row in records):
        mine = [row for row in records if label.format_map(row) == name]
        ours = mine[0]["backend"] == BACKEND_NAME
        points: Iterable[tuple[int, float]] = sorted((int(r["context"]), float(r[y])) for r in mine)
        style = {"marker": _MARKERS[ours], "color": _COLOURS[ours], "label": name}
        axis.plot(*zip(*points, strict=True), **style)


def _write_ratios(axis: Any, records: Records, field: str) -> None:
    """What ours gains, below each of its points."""
    others = [row for row in records if row["backend"] != BACKEND_NAME]
    theirs = {(row["context"], row["requests"]): float(row[field]) for row in others}
    for row in records:
        base = theirs.get((row["context"], row["requests"]))
        if row["backend"] == BACKEND_NAME and base is not None:
            place = (int(row["context"]), float(row[field]))
            axis.annotate(
                f"{base / float(row[field]):.2f}x", place, xytext=(0, -14), ha="center", fontsize=8,
                textcoords="offset points", color=_COLOURS[True],
            )  # fmt: skip

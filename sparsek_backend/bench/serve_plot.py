"""Plot of `sparsek bench serve`: both backends over the context, and what ours gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_backend.vllm_backend.names import BACKEND_NAME

_BASELINE_COLOUR, _OUR_COLOUR = "#6b6b6b", "#1b6ca8"


def plot_serve(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time to first token and time per output token against the context.

    Args:
        records: rows of `ServeRow`, as dictionaries; of several files, if of one model and machine.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is missing; the message has the install command.
        ValueError: no records, or of several models or GPUs.
    """
    pyplot = import_pyplot()
    about = {(row["model"], row["gpu"], row["vllm"]) for row in records}
    if len(about) != 1:
        raise ValueError(f"records: expected one model, GPU and vLLM version, got {sorted(about)}")
    ((model, gpu, vllm),) = about
    baseline = next((row["backend"] for row in records if row["backend"] != BACKEND_NAME), "")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    panels = (("ttft_ms", "time to first token, one request"), ("tpot_ms", "time per output token"))
    for axis, (field, title) in zip(axes, panels, strict=True):
        for requests in sorted({int(row["requests"]) for row in records}):
            found = {
                name: {
                    int(row["context"]): float(row[field])
                    for row in records
                    if row["backend"] == name and int(row["requests"]) == requests
                }
                for name in (baseline, BACKEND_NAME)
            }
            _draw(axis, found, requests, field)
            if field == "ttft_ms":  # measured with one request at a time, whatever decodes together
                break
        contexts = sorted({int(row["context"]) for row in records})
        axis.set_xscale("log", base=2)
        if field == "ttft_ms":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(pyplot.FuncFormatter(lambda ms, _: f"{ms:g}"))
        axis.set_xticks(contexts, [_size(context) for context in contexts])
        axis.margins(x=0.08, y=0.15)
        if field == "tpot_ms":
            axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens of context")
        axis.set_ylabel("milliseconds (less is better)")
        axis.set_title(title, fontsize=10)
        axis.grid(visible=True, which="major", alpha=0.25)
        axis.legend(fontsize=8, loc="upper left")
    figure.suptitle(f"{model}, {gpu}, vLLM {vllm}", fontsize=11)
    write_figure(figure, path)


def _draw(axis: Any, found: dict[str, dict[int, float]], requests: int, field: str) -> None:
    suffix = "" if field == "ttft_ms" else f", {requests} together"
    for name, times in found.items():
        ours = name == BACKEND_NAME
        contexts = sorted(times)
        axis.plot(
            contexts,
            [times[context] for context in contexts],
            marker="o" if ours else "s",
            color=_OUR_COLOUR if ours else _BASELINE_COLOUR,
            label=name + suffix,
        )
    *_, theirs, ours_by_context = found.values()
    for context, ms in ours_by_context.items():
        if context in theirs:
            ratio = theirs[context] / ms
            axis.annotate(
                f"{ratio:.2f}x",
                (context, ms),
                xytext=(0, -14),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=_OUR_COLOUR,
            )


def _size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)

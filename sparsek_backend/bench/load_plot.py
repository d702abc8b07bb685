"""Plot of `sparsek bench serve --rate`: goodput and the slowest requests of both backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_backend.vllm_backend.names import BACKEND_NAME

_PANELS = (
    ("goodput", "goodput, requests a second (more is better)"),
    ("tpot_p99_ms", "p99 of time per output token, ms (less is better)"),
    ("ttft_p99_ms", "p99 of time to first token, ms (less is better)"),
)


def plot_load(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw both backends: a line each over the arrival rate, or bars where there is one rate.

    Args:
        records: rows of `LoadRow`, as dictionaries.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is missing; the message has the install command.
    """
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    backends = list(dict.fromkeys(row["backend"] for row in records))
    rates = sorted({row["rate"] for row in records})
    for axis, (field, title) in zip(axes, _PANELS, strict=True):
        for backend in backends:
            ours = backend == BACKEND_NAME
            color = "#1b6ca8" if ours else "#6b6b6b"
            points = sorted((r["rate"], r[field]) for r in records if r["backend"] == backend)
            values = [value for _, value in points]
            if len(rates) == 1:
                bars = axis.bar([backend], values, width=0.5, color=color)
                labels = [f"{v:.3g}" if v < 1000 else f"{v:.0f}" for v in values]
                axis.bar_label(bars, labels, fontsize=9)
                continue
            marker = "o" if ours else "s"
            axis.plot(
                [rate for rate, _ in points], values, marker=marker, color=color, label=backend
            )
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, 1.1 * max(row[field] for row in records))
        axis.grid(visible=True, alpha=0.25, axis="y" if len(rates) == 1 else "both")
        if len(rates) == 1:
            axis.set_xlabel(f"{rates[0]:g} requests a second arrive")
        else:
            axis.set_xlabel("requests a second that arrive")
            axis.legend(fontsize=8)
    first = records[0]
    axes[1].axhline(first["tpot_limit_ms"], color="#b03030", linewidth=1, linestyle="--")
    figure.suptitle(
        f"{first['model']}, {first['mix']} of {first['mean_prompt_tokens']:.0f} tokens on average, "
        f"{first['gpu']}, vLLM {first['vllm']}",
        fontsize=11,
    )
    write_figure(figure, path)

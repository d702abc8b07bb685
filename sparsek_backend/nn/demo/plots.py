"""The demo's figures: loss, recall by distance, step time by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsek_backend.nn.demo.train import RunResult
from sparsek_backend.pyplot import import_pyplot, write_figure

COLOURS = {"nsa": "#1b6ca8", "dense": "#e07a1f"}
NAMES = {"nsa": "native sparse attention", "dense": "dense attention"}


def plot_all(results: list[RunResult], folder: Path) -> list[Path]:
    """Write ``loss.png``, ``recall.png`` and, with times, ``step_time.png``; their paths.

    Raises:
        ImportError: matplotlib is missing; the message has the install command.
    """
    pyplot = import_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    draws = {"loss": _draw_loss, "recall": _draw_recall}
    if any(result.step_ms for result in results):
        draws["step_time"] = _draw_step_time
    for name, draw in draws.items():
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
        for result in results:
            draw(axes, result)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend()
        figure.tight_layout()
        written.append(write_figure(figure, folder / f"{name}.png", dpi=120))
    return written


def _draw_loss(axes: Any, result: RunResult) -> None:
    """Losses of single steps, and their running mean."""
    colour, losses = COLOURS[result.kind], result.losses
    span = max(len(losses) // 75, 1)
    means = [sum(losses[max(i - span, 0) : i + 1]) / (min(i, span) + 1) for i in range(len(losses))]
    axes.plot(losses, color=colour, linewidth=0.5, alpha=0.35)
    axes.plot(means, color=colour, label=NAMES[result.kind])
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss (nats per answer)", title="Training loss")


def _draw_recall(axes: Any, result: RunResult) -> None:
    """Recall by distance at the longest length measured."""
    length = max(result.recall)
    recall = result.recall[length]
    buckets = {int(name[2:]): share for name, share in recall.items() if name.startswith("<=")}
    label = f"{NAMES[result.kind]}, {recall['all']:.1%} overall"
    axes.plot(list(buckets), list(buckets.values()), "o-", color=COLOURS[result.kind], label=label)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="tokens between pair and question, at most",
        ylabel="share of right answers",
        ylim=(-0.02, 1.02),
        title=f"Recall in {length} tokens",
    )


def _draw_step_time(axes: Any, result: RunResult) -> None:
    """Step time by length, both axes logarithmic."""
    lengths, times = list(result.step_ms), list(result.step_ms.values())
    axes.plot(lengths, times, "o-", color=COLOURS[result.kind], label=NAMES[result.kind])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(
        xlabel="sequence length (tokens)",
        ylabel="forward + backward (ms)",
        title="A training step of equally many tokens",
    )

"""The demo's figures: loss, recall by distance, step time by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsek_backend.nn.demo.train import RunResult

COLOURS = {"nsa": "#1b6ca8", "dense": "#e07a1f"}


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib is not installed: run `pip install 'sparsek-backend[bench]'`"
        ) from error
    return pyplot


def plot_all(
    results: list[RunResult], times: dict[str, dict[int, float]], folder: Path
) -> list[Path]:
    """Write ``loss.png``, ``recall.png`` and, with times, ``step_time.png``; their paths."""
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def save(figure: Any, axes: Any, name: str) -> None:
        axes.legend()
        figure.tight_layout()
        figure.savefig(folder / name, dpi=130)
        pyplot.close(figure)
        written.append(folder / name)

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for result in results:
        axes.plot(result.losses, color=COLOURS[result.kind], label=result.kind, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats)", title="Training loss")
    save(figure, axes, "loss.png")

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for result in results:
        length = max(result.recall)
        buckets = {k: v for k, v in result.recall[length].items() if k.startswith("<=")}
        ends = [int(name[2:]) for name in buckets]
        label = f"{result.kind}, {length} tokens"
        axes.plot(ends, list(buckets.values()), "o-", color=COLOURS[result.kind], label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="distance (tokens)", ylabel="recall", ylim=(-0.02, 1.02), title="Recall")
    save(figure, axes, "recall.png")

    if times:
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for kind, by_length in times.items():
            lengths, values = list(by_length), list(by_length.values())
            axes.plot(lengths, values, "o-", color=COLOURS[kind], label=kind)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="length (tokens)", ylabel="forward + backward (ms)", title="Step time")
        save(figure, axes, "step_time.png")
    return written

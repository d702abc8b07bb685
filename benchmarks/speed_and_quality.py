"""The README's figure: what sparse attention gains in time and keeps in answers, over the context.

    python benchmarks/speed_and_quality.py

It reads files of ``benchmarks/results/``: times and answers of version 0.2.0 and of fewer
blocks.  It writes ``speed_and_quality_h200.png`` beside them.  The picture holds a digest of these
files, so that the tests can tell whether it is of the committed ones.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsek_backend.bench.results import Row, read_csv, speedup
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.pyplot import import_pyplot

RESULTS = Path(__file__).resolve().parent / "results"
SPEED = (
    ("version 0.2.0", RESULTS / "paged_h200.csv", ("paged_prefill", "paged_decode")),
    ("64 blocks", RESULTS / "paged_64_h200.csv", ("paged_prefill", "paged_decode")),
)
"""Whose times, their file, and the ops that the file has them of."""
STYLES = {"version 0.2.0": "-", "64 blocks": "--"}
CONTEXTS = [8192 << i for i in range(5)]
"""Contexts between the first and the last of which times are shown, and of the first answers."""


@dataclass(frozen=True)
class Answers:
    """Answers of one budget.

    Args:
        words: the budget's name in the legend.
        label: its name in the files.
        files: of one length each.
        marker: of its points.
        shift: factor of the lengths, so that bars stand side by side.
    """

    words: str
    label: str
    files: tuple[Path, ...]
    marker: str
    shift: float


def _quality(name: str) -> Path:
    return RESULTS / f"quality_qwen05b_{name}_h200.json"


QUALITY = (
    Answers(
        "version 0.2.0",
        "block_topk:96,decode_top_k=192",
        tuple(_quality(f"{length}_fourth") for length in ("8k", "16k", "31k")),
        "o",
        0.9,
    ),
    Answers(
        "64 blocks for prompts, 128 for decoded tokens",
        "block_topk:64,decode_top_k=128",
        tuple(_quality(length) for length in ("8k", "16k", "31k")),
        "x",
        1.1,
    ),
)
FIGURE = RESULTS / "speed_and_quality_h200.png"
VARIANTS = {"plain": "question last", "followed": "question 600 tokens before the end"}


def digest() -> str:
    """Return a digest of the files that the figure is drawn from."""
    paths = dict.fromkeys(path for _, path, _ in SPEED)
    paths.update(dict.fromkeys(path for answers in QUALITY for path in answers.files))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def speed_lines(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return (context, times as fast as FlashAttention-3) of what is shown, by kind of step."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        batch = parse_spec(row.spec)
        if row.provider != "sparsek" or row.op == "paged_select" or not batch.is_uniform:
            continue
        if row.op == "paged_decode" and batch.query_lens[0] > 1:
            continue
        many = "" if batch.num_requests == 1 else "s"
        name = f"decode, {batch.num_requests} request{many}"
        ratio = speedup(rows, row).get("fa3")
        if ratio is not None and CONTEXTS[0] <= batch.seq_lens[0] <= CONTEXTS[-1]:
            key = "prefill" if row.op == "paged_prefill" else name
            lines.setdefault(key, []).append((batch.seq_lens[0], ratio))
    return {name: sorted(points) for name, points in lines.items()}


def draw_speed(axis: Any) -> None:
    """Draw how many times as fast attention is, a line for each kind of step and budget."""
    colours: dict[str, str] = {}
    for budget, path, ops in SPEED:
        rows = [row for row in read_csv(path) if row.op in ops]
        for name, points in speed_lines(rows).items():
            label = None if name in colours else name
            colour = colours.setdefault(name, f"C{len(colours)}")
            style, face = STYLES[budget], colour if STYLES[budget] == "-" else "white"
            drawn = dict(color=colour, marker="o", markerfacecolor=face, label=label)
            axis.plot(*zip(*points, strict=True), style, **drawn)
    for budget, style in STYLES.items():
        face = "black" if style == "-" else "white"
        axis.plot([], [], style, color="black", marker="o", markerfacecolor=face, label=budget)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_yscale("log", base=2)
    axis.set_ylim(0.8, 16.0)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.set_title("attention, times as fast as FlashAttention-3", fontsize=10)


def draw_quality(axis: Any) -> None:
    """Draw the accuracy of each budget over that of dense attention, with its 95 % interval."""
    for answers in QUALITY:
        for number, variant in enumerate(VARIANTS):
            points = []
            for path in answers.files:
                result = json.loads(path.read_text(encoding="utf-8"))
                means = [r for r in result["retrieval"] if r["task"] == "mean"]
                rows = {row["label"]: row for row in means if row["variant"] == variant}
                dense, ours = rows["dense"], rows[answers.label]
                bounds = [
                    ours[f"delta_accuracy_{end}"] / dense["accuracy"] for end in ("low", "high")
                ]
                shift = answers.shift * 1.06**number
                points.append((ours["length"] * shift, ours["of_reference"], *bounds))
            x, y, low, high = zip(*points, strict=True)
            below = [share - 1 - bound for share, bound in zip(y, low, strict=True)]
            above = [bound - share + 1 for share, bound in zip(y, high, strict=True)]
            style = dict(color=f"C{number}", marker=answers.marker, linestyle="none", capsize=3)
            axis.errorbar(x, y, [below, above], **style)
    for number, name in enumerate(VARIANTS.values()):
        axis.plot([], [], color=f"C{number}", label=name)
    for answers in QUALITY:
        axis.plot([], [], answers.marker, color="black", label=answers.words)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_ylim(0.7, 1.15)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title("answers kept, of dense attention's (0.5B model)", fontsize=10)


def main() -> None:
    """Draw the figure."""
    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=(3, 2), layout="constrained"
    )
    draw_speed(left)
    draw_quality(right)
    for axis, contexts in ((left, CONTEXTS), (right, CONTEXTS[:3])):
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts)
        axis.set_xticklabels([f"{tick >> 10}k" for tick in contexts], fontsize=8)
        axis.set_xlim(0.75 * contexts[0], 1.25 * contexts[-1])
        axis.set_xlabel("tokens of context")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left" if axis is left else "lower left")
    figure.savefig(FIGURE, dpi=130, metadata={"Data": digest()})
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()

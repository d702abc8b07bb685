"""The README's figure: what sparse attention gains in time and keeps in answers, over the context.

    python benchmarks/speed_and_quality.py

It reads ``paged_*h200.csv`` and ``quality_qwen05b_*_h200.json`` of ``benchmarks/results/``, and
writes ``speed_and_quality_h200.png`` beside them.  The picture holds a digest of these files, so
that the tests can tell whether it is of the committed ones.
"""

from __future__ import annotations

import hashlib
import json
from itertools import chain, product
from pathlib import Path
from typing import Any

from sparsek_backend.bench.results import Row, read_csv, speedup
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.pyplot import import_pyplot

RESULTS = Path(__file__).resolve().parent / "results"
SPEED = {
    "64 blocks": RESULTS / "paged_h200.csv",
    "32 blocks": RESULTS / "paged_blocks32_h200.csv",
}
LENGTHS = ("8k", "16k", "31k")
QUALITY = {
    "block_topk:64": [RESULTS / f"quality_qwen05b_{n}_blocks64_h200.json" for n in LENGTHS],
    "block_topk:32": [RESULTS / f"quality_qwen05b_{n}_h200.json" for n in LENGTHS],
}
FIGURE = RESULTS / "speed_and_quality_h200.png"
VARIANTS = {"plain": "question last", "followed": "question 600 tokens before the end"}
BUDGETS = {"block_topk:64": "64 blocks", "block_topk:32": "32 blocks"}


def digest() -> str:
    """Return a digest of the files that the figure is drawn from."""
    paths = (*SPEED.values(), *chain(*QUALITY.values()))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def speed_lines(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return (context, times as fast as FlashAttention-3), by kind and number of requests."""
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
        if ratio is not None:
            key = "prefill" if row.op == "paged_prefill" else name
            lines.setdefault(key, []).append((batch.seq_lens[0], ratio))
    return {name: sorted(points) for name, points in lines.items()}


def draw_speed(axis: Any) -> None:
    """Draw how many times as fast attention is, a line for each kind of step and budget."""
    colours: dict[str, str] = {}
    for (size, path), style in zip(SPEED.items(), ("-", "--"), strict=True):
        for name, points in speed_lines(read_csv(path)).items():
            colour = colours.setdefault(name, f"C{len(colours)}")
            label = name if style == "-" else None
            axis.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=label)
        axis.plot([], [], style, color="black", label=size)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.set_title("attention, times as fast as FlashAttention-3", fontsize=10)


def draw_quality(axis: Any) -> None:
    """Draw the accuracy of each budget over that of dense attention, with its 95 % interval."""
    lines = product(BUDGETS.items(), VARIANTS.items())
    for shift, ((label, size), (variant, name)) in zip(
        (0.94, 0.98, 1.02, 1.06), lines, strict=True
    ):
        points = []
        for path in QUALITY[label]:
            result = json.loads(path.read_text(encoding="utf-8"))
            means = [r for r in result["retrieval"] if r["task"] == "mean"]
            rows = {row["label"]: row for row in means if row["variant"] == variant}
            dense, ours = rows["dense"], rows[label]
            bounds = [ours[f"delta_accuracy_{end}"] / dense["accuracy"] for end in ("low", "high")]
            points.append((ours["length"] * shift, ours["of_reference"], *bounds))
        x, y, low, high = zip(*points, strict=True)
        below = [share - 1 - bound for share, bound in zip(y, low, strict=True)]
        above = [bound - share + 1 for share, bound in zip(y, high, strict=True)]
        axis.errorbar(x, y, [below, above], marker="o", capsize=3, label=f"{size}, {name}")
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_ylim(0.0, 1.2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title("answers kept, of dense attention's (0.5B model)", fontsize=10)


def main() -> None:
    """Draw the figure."""
    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), sharex=True, layout="constrained"
    )
    draw_speed(left)
    draw_quality(right)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks := [2048 << i for i in range(10)])
        axis.set_xticklabels([f"{t >> 10}k" if t < 1 << 20 else "1M" for t in ticks], fontsize=8)
        axis.set_xlabel("tokens of context")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left" if axis is left else "lower right")
    figure.savefig(FIGURE, dpi=130, metadata={"Data": digest()})
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()

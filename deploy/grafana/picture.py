"""Draw the dashboard's panels from a Prometheus server, without Grafana.

    python picture.py http://127.0.0.1:9090 dashboard.png

Panels, places, units and queries are of ``sparsek.json``; the settings' table is left out.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from sparsek_backend.pyplot import import_pyplot

DASHBOARD = Path(__file__).parent / "sparsek.json"
SECONDS, STEP = 180, 2
UNITS = {"percentunit": "{:.0%}", "s": "{:g} s", "cps": "{:g}/s", "short": "{:g}"}


def series(server: str, query: str, end: float) -> list[dict[str, Any]]:
    """Return the series of a range query that ends at a time."""
    question = urllib.parse.urlencode(
        {"query": query, "start": end - SECONDS, "end": end, "step": STEP}
    )
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{question}", timeout=30) as reply:
        return list(json.load(reply)["data"]["result"])


def legend(template: str, labels: dict[str, str]) -> str:
    """Return a legend with its labels filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template).strip()


def draw(axis: Any, server: str, panel: dict[str, Any], end: float) -> None:
    """Draw one panel of time series."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "20s").replace("$model_name", ".*")
        for found in series(server, query, end):
            points = [(float(at) - end, float(value)) for at, value in found["values"]]
            name = legend(target["legendFormat"], found["metric"])
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
    unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    axis.yaxis.set_major_formatter(lambda value, _: unit.format(round(value, 6)))
    axis.set_title(panel["title"], fontsize=10, loc="left")
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=7)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=6, loc="upper left", frameon=False)


def main(server: str, out: str) -> None:
    """Draw the dashboard into a file."""
    pyplot = import_pyplot()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    drawn = [panel for panel in panels if panel["type"] == "timeseries"]
    columns = 24 // drawn[0]["gridPos"]["w"]
    figure, axes = pyplot.subplots(
        len(drawn) // columns, columns, sharex=True, figsize=(13, 7.5), layout="constrained"
    )
    end = time.time()
    for axis, panel in zip(axes.flat, drawn, strict=True):
        draw(axis, server, panel, end)
    axes.flat[0].set_xlim(right=0)
    figure.supxlabel("seconds before now", fontsize=8)
    figure.savefig(out, dpi=100)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])

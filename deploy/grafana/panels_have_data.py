"""Evaluate every query of the dashboard on a Prometheus server; exit 1 where one has no data.

python panels_have_data.py http://127.0.0.1:9090
"""

from __future__ import annotations

import json
import math
import sys
import urllib.parse
import urllib.request
from pathlib import Path

DASHBOARD = Path(__file__).parent / "sparsek.json"


def values(server: str, query: str) -> list[float]:
    """Return the values of an instant query."""
    question = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"{server}/api/v1/query?{question}", timeout=30) as reply:
        answer = json.load(reply)
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def main(server: str) -> int:
    """Print a line for each query, and return how many have no number."""
    missing = 0
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "2m").replace("$model_name", ".*")
            found = [value for value in values(server, query) if not math.isnan(value)]
            missing += not found
            shown = ", ".join(f"{value:.4g}" for value in found) or "no data"
            print(f"{panel['title']} ({target['legendFormat'] or 'table'}): {shown}")
    return missing


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))

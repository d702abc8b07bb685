"""The queries of the Grafana dashboard and of the alert rules, and what they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import yaml

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
LABELS_OF_A_SCRAPE = {"job", "instance"}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Panel and query, with Grafana's variables filled in."""
    for panel in json.loads((GRAFANA / "sparsek.json").read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$model_name", ".*")
            yield panel["title"], query


def rule_queries() -> Iterator[tuple[str, str]]:
    """Name and query of every rule."""
    for group in yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def selected(query: str) -> set[tuple[str, str]]:
    """Metric and label of every selector and aggregation; label ``""`` stands for the metric."""
    found: set[tuple[str, str]] = set()
    names: list[str] = []
    labels: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            names.append(node.name)
            found.update((node.name, matcher.name) for matcher in node.matchers.matchers)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    return found | {(name, label) for name in names for label in {"", *labels}}

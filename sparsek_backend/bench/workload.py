"""Workloads from YAML: which op, at which batch specs, with which parameters and bars.

defaults: {num_heads: 32, num_kv_heads: 8, head_dim: 128}
workloads:
  - op: sink_window_fwd
    name: sink4-w4096
    specs: [q32k, q128k]
    params: {num_sink: 4, window_size: 4096}
    bars: {flex: 1.2, fa3: 0.92}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsek_backend.bench.ops import get_op
from sparsek_backend.bench.registry import BenchOp, Case
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.timing import TIMINGS

_KEYS = {"op", "name", "specs", "params", "bars", "timing", "providers"}


@dataclass(frozen=True)
class Workload:
    """One op's cases under one name, a case per batch spec."""

    op: BenchOp
    name: str
    cases: tuple[Case, ...]


def load_workloads(path: Path) -> list[Workload]:
    """Read a workload file.

    Raises:
        ImportError: pyyaml is missing; the message has the install command.
        ValueError: unknown op, key, parameter, timing or malformed spec; the message names the file
            and the workload.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "reading workloads needs pyyaml: pip install 'sparsek-backend[bench]'"
        ) from error
    if not path.is_file():
        raise ValueError(f"yaml: expected a workload file, got {str(path)!r} which does not exist")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"yaml: {path} is no valid YAML: {error}") from error
    return parse_workloads(document, source=str(path))


def parse_workloads(document: object, source: str) -> list[Workload]:
    """The workloads of a parsed document; `source` names it in errors."""
    if not isinstance(document, Mapping) or not isinstance(document.get("workloads"), list):
        raise ValueError(f"{source}: expected a mapping with a list 'workloads'")
    unknown = set(document) - {"defaults", "workloads"}
    if unknown:
        raise ValueError(f"{source}: unknown keys {sorted(map(str, unknown))}")
    defaults = document.get("defaults") or {}
    workloads = [_workload(entry, defaults, source) for entry in document["workloads"]]
    seen: set[tuple[str, str]] = set()
    for workload in workloads:
        key = (workload.op.name, workload.name)
        if key in seen:
            raise ValueError(f"{source}: workload {workload.name!r} of {key[0]} appears twice")
        seen.add(key)
    return workloads


def _workload(entry: Any, defaults: Mapping[str, Any], source: str) -> Workload:
    if not isinstance(entry, Mapping) or not {"op", "name", "specs"} <= set(entry):
        raise ValueError(f"{source}: a workload needs 'op', 'name' and 'specs', got {entry!r}")
    where = f"{source}: workload {entry['name']!r}"
    unknown = set(entry) - _KEYS
    if unknown:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}, expected {sorted(_KEYS)}")
    op = get_op(str(entry["op"]))
    given = entry.get("params") or {}
    for name in given:
        if name not in op.defaults:
            raise ValueError(
                f"{where}: unknown parameter {name!r} of {op.name}, expected {sorted(op.defaults)}"
            )
    shared = {name: value for name, value in defaults.items() if name in op.defaults}
    params = {**op.defaults, **shared, **given}
    timing = str(entry.get("timing", "cold"))
    if timing not in TIMINGS:
        raise ValueError(f"{where}: timing: expected one of {TIMINGS}, got {timing!r}")
    cases = []
    if not isinstance(entry["specs"], list) or not entry["specs"]:
        raise ValueError(f"{where}: specs: expected a list of batch specs, got {entry['specs']!r}")
    for text in entry["specs"]:
        try:
            spec = parse_spec(str(text))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        cases.append(
            Case(
                name=str(entry["name"]),
                spec=spec,
                params=params,
                bars={str(k): float(v) for k, v in (entry.get("bars") or {}).items()},
                timing=timing,
                providers=tuple(entry.get("providers") or ()),
            )
        )
    return Workload(op, str(entry["name"]), tuple(cases))
